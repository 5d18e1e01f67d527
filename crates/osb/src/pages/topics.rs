//! The pages that `osb help` shows, which are those of `docs/`.

use super::text;

/// A page about something that is not one command.
pub(super) struct Topic {
    /// Word behind `osb help`, and the file's name.
    pub(super) name: &'static str,
    /// What it is about.
    pub(super) about: &'static str,
    markdown: &'static str,
}

impl Topic {
    /// The page as text.
    pub(super) fn text(&self) -> String {
        text::render(self.markdown)
    }
}

macro_rules! topic {
    ($name:literal, $about:literal) => {
        Topic {
            name: $name,
            about: $about,
            markdown: include_str!(concat!("../../../../docs/", $name, ".md")),
        }
    };
}

/// In the order in which somebody new would read them.
pub(super) static TOPICS: [Topic; 14] = [
    topic!("install", "what a machine needs, installing, updating, removing"),
    topic!("quickstart", "the first sandbox, from the terminal and by an SDK"),
    topic!("images", "where images come from, and how they are kept"),
    topic!("cli", "commands, settings, output and exit codes of this program"),
    topic!("terminals", "shells in sandboxes, leaving and coming back, the protocol"),
    topic!("isolated-sessions", "shells with a view of their own within a sandbox"),
    topic!("errors", "every error code: what it means and what to do"),
    topic!("environment", "what a program finds inside a sandbox"),
    topic!("hooks", "commands that a sandbox runs by itself"),
    topic!("containers", "the daemon in containers of other engines"),
    topic!("isolation", "what keeps sandboxes apart, and what does not"),
    topic!("observability", "output kept, usage, metrics, OpenTelemetry and the log of sandboxes"),
    topic!("configuration", "every setting of the server"),
    topic!("numbers", "how fast it is, and how that was measured"),
];

/// The topic of this name, in whatever case.
pub(super) fn find(name: &str) -> Option<&'static Topic> {
    TOPICS.iter().find(|topic| topic.name.eq_ignore_ascii_case(name))
}

/// The list of topics as a paragraph of help.
pub(super) fn list() -> String {
    let lines: Vec<String> =
        TOPICS.iter().map(|topic| format!("  {:<13} {}\n", topic.name, topic.about)).collect();
    format!("Topics (osb help TOPIC, or an error's code):\n{}", lines.concat())
}

/// What the page of errors says of a code, which may be given without the part before `::`.
pub(super) fn error_code(word: &str) -> Option<String> {
    let errors = find("errors")?.markdown;
    let meant = |code: &str| {
        let last = code.rsplit("::").next().unwrap_or(code);
        let is_code = !code.is_empty() && code.chars().all(|c| c.is_ascii_uppercase() || "_:".contains(c));
        is_code && (code.eq_ignore_ascii_case(word) || last.eq_ignore_ascii_case(word))
    };
    Some(text::rows(errors, meant)).filter(|found| !found.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_readable_as_text() {
        for topic in &TOPICS {
            let text = topic.text();
            assert!(text.lines().nth(1).is_some_and(|line| line.starts_with("===")), "{}", topic.name);
            for mark in ["](", "**", "```", "|--", "<!--"] {
                assert!(!text.contains(mark), "{}: {mark}", topic.name);
            }
            for line in text.lines().filter(|line| !line.starts_with("    ")) {
                let one_word = line.split_whitespace().count() == 1;
                assert!(line.chars().count() <= 80 || one_word, "{}: {line}", topic.name);
            }
        }
    }

    #[test]
    fn every_page_of_the_directory_is_a_topic() {
        let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        for entry in std::fs::read_dir(docs).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
                assert!(find(&name).is_some(), "docs/{name}.md is not listed");
            }
        }
    }

    /// The command lines of `osb` in a page's blocks of shell, as words.
    fn command_lines(markdown: &str) -> Vec<Vec<String>> {
        let blocks = markdown.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
        blocks.flat_map(str::lines).filter_map(command_line).collect()
    }

    /// The words of the call in a line, without what belongs to the shell.
    fn command_line(line: &str) -> Option<Vec<String>> {
        let bare = |line: &'_ str| line.trim_start_matches("sudo ").trim_start_matches("ID=$(").to_owned();
        let behind_pipe = line.split_once("| ").map(|(_, line)| bare(line));
        let line =
            [Some(bare(line)), behind_pipe].into_iter().flatten().find(|line| line.starts_with("osb "))?;
        let mut words = vec![String::new()];
        let mut quote = None;
        for c in line.chars() {
            match (c, quote) {
                ('\'' | '"', None) => quote = Some(c),
                (_, Some(open)) if c == open => quote = None,
                (' ', None) => words.push(String::new()),
                _ => words.last_mut()?.push(c),
            }
        }
        let ours = |word: &String| !["#", "<", ">", "|", "&&"].contains(&word.as_str());
        Some(words.into_iter().take_while(ours).filter(|word| !word.is_empty()).collect())
    }

    #[test]
    fn command_lines_of_the_pages_are_taken() {
        let readme = include_str!("../../../../README.md");
        let pages = TOPICS.iter().map(|topic| (topic.name, topic.markdown)).chain([("README", readme)]);
        let mut seen = 0;
        for (name, markdown) in pages {
            for words in command_lines(markdown) {
                seen += 1;
                let taken = crate::whole().try_get_matches_from(&words);
                assert!(taken.is_ok(), "{name}: {words:?}: {}", taken.unwrap_err());
            }
        }
        assert!(seen > 50, "{seen}");
        assert_eq!(
            command_line("x | sudo osb run a -- 'b c' > d  # e").unwrap(),
            ["osb", "run", "a", "--", "b c"]
        );
        assert_eq!(command_line("make"), None);
    }

    #[test]
    fn the_page_of_the_command_line_has_all_commands_and_exit_codes() {
        let page = find("cli").unwrap().markdown;
        for command in crate::whole().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = format!("osb {}", command.get_name());
            assert!(page.contains(&format!("`{name}`")) || page.contains(&format!("`{name} ")), "{name}");
        }
        for (code, meaning) in osb_cli::exit::TABLE {
            assert!(page.contains(&format!("| {code} | {meaning} |")), "{code}");
        }
    }

    #[test]
    fn codes_are_explained() {
        use osb_client::protocol::{error, execd};
        for code in [error::code::SANDBOX_NOT_FOUND, error::code::UNKNOWN_ERROR, execd::code::FILE_NOT_FOUND]
        {
            let text = error_code(code).unwrap_or_default();
            assert!(text.starts_with(code) && text.contains("status: "), "{code}: {text}");
        }
        let short = error_code("sandbox_start_failed").unwrap();
        assert!(short.starts_with("DOCKER::SANDBOX_START_FAILED\n"), "{short}");
        assert_eq!(error_code("code"), None);
        assert_eq!(error_code(""), None);
    }
}
