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
pub(super) static TOPICS: [Topic; 9] = [
    topic!("install", "what a machine needs, installing, updating, removing"),
    topic!("quickstart", "the first sandbox, from the terminal and by an SDK"),
    topic!("images", "where images come from, and how they are kept"),
    topic!("cli", "commands, settings, output and exit codes of this program"),
    topic!("errors", "every error code: what it means and what to do"),
    topic!("environment", "what a program finds inside a sandbox"),
    topic!("isolation", "what keeps sandboxes apart, and what does not"),
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
