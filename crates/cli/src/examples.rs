//! Examples in help texts: for every command at least one, and every one is a command line that is taken.

use clap::Command;

/// Command (without `osb`) and its examples (with).
const EXAMPLES: &[(&str, &[&str])] = &[
    (
        "run",
        &[
            "osb run host -- python3 -c 'print(1 + 1)'",
            "osb run host --copy-in src:/work/ --copy-out /work/out:out -w /work/src -- make",
            "osb run -i host -- sort < names.txt",
            "osb run -it host -- vim /etc/hosts",
            "osb run host -- 'ls /usr | wc -l'",
        ],
    ),
    (
        "shell",
        &[
            "osb shell SANDBOX_ID",
            "osb shell SANDBOX_ID -w /work -- htop",
            "osb shell SANDBOX_ID --session SESSION_ID",
        ],
    ),
    (
        "sandbox create",
        &[
            "osb sandbox create -i host -t 30m -e NAME=value -m team=search --resource cpu=2",
            "osb sandbox create -i python:3.12 --entrypoint python --entrypoint -m --entrypoint http.server",
            "osb sandbox create -f request.json -o json",
        ],
    ),
    ("sandbox list", &["osb sandbox list -s Running -m team=search", "osb sandbox list -o json"]),
    ("sandbox get", &["osb sandbox get SANDBOX_ID -o yaml"]),
    ("sandbox kill", &["osb sandbox kill SANDBOX_ID OTHER_ID"]),
    ("sandbox pause", &["osb sandbox pause SANDBOX_ID"]),
    ("sandbox resume", &["osb sandbox resume SANDBOX_ID --resume-timeout 1m"]),
    ("sandbox renew", &["osb sandbox renew SANDBOX_ID -t 1h30m"]),
    ("sandbox patch", &["osb sandbox patch SANDBOX_ID -m name=web --remove draft"]),
    ("sandbox endpoint", &["osb sandbox endpoint SANDBOX_ID -p 8000"]),
    ("sandbox health", &["osb sandbox health SANDBOX_ID"]),
    ("sandbox metrics", &["osb sandbox metrics SANDBOX_ID", "osb sandbox metrics SANDBOX_ID --watch"]),
    (
        "command run",
        &[
            "osb command run SANDBOX_ID -- ls -la /tmp",
            "osb command run SANDBOX_ID -- 'cat /etc/os-release | head -1'",
            "osb command run SANDBOX_ID -d -o json -- sleep 60",
        ],
    ),
    ("command status", &["osb command status SANDBOX_ID EXECUTION_ID"]),
    (
        "command logs",
        &["osb command logs SANDBOX_ID EXECUTION_ID", "osb command logs SANDBOX_ID EXECUTION_ID -f"],
    ),
    ("command interrupt", &["osb command interrupt SANDBOX_ID EXECUTION_ID"]),
    ("command session create", &["osb command session create SANDBOX_ID -w /work"]),
    ("command session run", &["osb command session run SANDBOX_ID SESSION_ID -- export A=1"]),
    ("command session delete", &["osb command session delete SANDBOX_ID SESSION_ID"]),
    ("file cat", &["osb file cat SANDBOX_ID /etc/hostname"]),
    (
        "file write",
        &["osb file write SANDBOX_ID /tmp/note -c 'some text'", "osb file write SANDBOX_ID /tmp/in < in"],
    ),
    (
        "file upload",
        &[
            "osb file upload SANDBOX_ID data.csv /work/data.csv",
            "osb file upload -r SANDBOX_ID src /work/src",
        ],
    ),
    (
        "file download",
        &["osb file download SANDBOX_ID /work/out.csv out.csv", "osb file download -r SANDBOX_ID /work out"],
    ),
    ("file ls", &["osb file ls SANDBOX_ID /work --depth 2"]),
    ("file rm", &["osb file rm SANDBOX_ID /tmp/a /tmp/b"]),
    ("file rmdir", &["osb file rmdir SANDBOX_ID /work/build"]),
    ("file mkdir", &["osb file mkdir SANDBOX_ID /work/new --mode 755"]),
    ("file mv", &["osb file mv SANDBOX_ID /tmp/a /tmp/b"]),
    ("file search", &["osb file search SANDBOX_ID /work -p '*.py'"]),
    ("file info", &["osb file info SANDBOX_ID /etc/passwd -o json"]),
    ("file chmod", &["osb file chmod SANDBOX_ID /work/run.sh --mode 755"]),
    ("file replace", &["osb file replace SANDBOX_ID /work/a.txt --old one --new two"]),
    (
        "cp",
        &[
            "osb cp src SANDBOX_ID:/work/",
            "osb cp SANDBOX_ID:/work/out .",
            "osb cp src/. SANDBOX_ID:/work/src",
        ],
    ),
    ("logs", &["osb logs -f SANDBOX_ID", "osb logs SANDBOX_ID EXECUTION_ID"]),
    ("top", &["osb top --sort memory", "osb top --once -o json"]),
    ("events", &["osb events", "osb events --existing -o json SANDBOX_ID"]),
    ("port-forward", &["osb port-forward SANDBOX_ID 8000:80", "osb port-forward SANDBOX_ID 8000 9000:90"]),
    ("diagnostics logs", &["osb diagnostics logs SANDBOX_ID -s container"]),
    ("diagnostics events", &["osb diagnostics events SANDBOX_ID -s runtime -o json"]),
    ("devops logs", &["osb devops logs SANDBOX_ID -n 20"]),
    ("devops inspect", &["osb devops inspect SANDBOX_ID"]),
    ("devops events", &["osb devops events SANDBOX_ID -l 10"]),
    ("devops summary", &["osb devops summary SANDBOX_ID"]),
    ("config init", &["osb config init"]),
    ("config show", &["osb config show -o json"]),
    (
        "config set",
        &[
            "osb config set connection.domain localhost:8080",
            "osb config set profiles.work.connection.domain sandboxes.example.org",
        ],
    ),
    ("skills list", &["osb skills list"]),
    ("skills show", &["osb skills show command-execution"]),
    ("skills install", &["osb skills install --all-builtins -t claude --scope project"]),
    ("skills uninstall", &["osb skills uninstall file-operations -t all --scope global"]),
    ("template create", &["osb template create -i python:3.12 -p s3://bucket/templates"]),
    ("template get", &["osb template get TEMPLATE_ID"]),
    ("template list", &["osb template list -m team=search"]),
    ("template delete", &["osb template delete TEMPLATE_ID"]),
    ("snapshot create", &["osb snapshot create SANDBOX_ID --name before"]),
    ("snapshot get", &["osb snapshot get SNAPSHOT_ID"]),
    ("snapshot list", &["osb snapshot list --sandbox-id SANDBOX_ID"]),
    ("snapshot delete", &["osb snapshot delete SNAPSHOT_ID"]),
    ("egress get", &["osb egress get SANDBOX_ID"]),
    ("egress patch", &["osb egress patch SANDBOX_ID --rule allow=pypi.org --rule deny=example.org"]),
    ("credential-vault create", &["osb credential-vault create SANDBOX_ID --file vault.yaml"]),
    ("credential-vault patch", &["osb credential-vault patch SANDBOX_ID --file - < change.json"]),
    ("credential-vault get", &["osb credential-vault get SANDBOX_ID"]),
    ("credential-vault delete", &["osb credential-vault delete SANDBOX_ID"]),
    ("credential-vault credential list", &["osb credential-vault credential list SANDBOX_ID"]),
    ("credential-vault credential get", &["osb credential-vault credential get SANDBOX_ID github"]),
    ("credential-vault binding list", &["osb credential-vault binding list SANDBOX_ID"]),
    ("credential-vault binding get", &["osb credential-vault binding get SANDBOX_ID github"]),
    ("image list", &["osb image list"]),
    ("image inspect", &["osb image inspect host -o json"]),
    ("image rm", &["osb image rm my/tool:1"]),
    ("server", &["osb server", "osb server --config /etc/opensandbox/config.toml", "osb server --check"]),
    ("server init-config", &["osb server init-config /etc/opensandbox/config.toml"]),
    ("completions", &["osb completions bash > /etc/bash_completion.d/osb", "osb completions fish"]),
    ("man", &["osb man /usr/local/share/man/man1"]),
    ("help", &["osb help", "osb help sandbox create"]),
];

/// The examples of a command, by its path without `osb`.
fn of(path: &str) -> Option<&'static [&'static str]> {
    EXAMPLES.iter().find(|(name, _)| *name == path).map(|(_, lines)| *lines)
}

/// Puts examples below the help of a command and of all its subcommands.
#[must_use]
pub fn with_examples(command: Command) -> Command {
    add(command, "")
}

fn add(mut command: Command, path: &str) -> Command {
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    for name in names {
        let below = if path.is_empty() { name.clone() } else { format!("{path} {name}") };
        command = command.mut_subcommand(name, |sub| add(sub, &below));
    }
    match of(path) {
        Some(lines) => {
            let lines: Vec<String> = lines.iter().map(|line| format!("  {line}\n")).collect();
            command.after_help(format!("Examples:\n{}", lines.concat()))
        }
        None => command,
    }
}

/// The words of every example, for tests.
#[doc(hidden)]
#[must_use]
pub fn command_lines() -> Vec<Vec<String>> {
    EXAMPLES.iter().flat_map(|(_, lines)| lines.iter()).map(|line| words(line)).collect()
}

/// Splits as a shell does; redirections are left out.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut quoted = false;
    let mut word = String::new();
    for c in line.chars() {
        match c {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(std::mem::take(&mut word)),
            other => word.push(other),
        }
    }
    words.push(word);
    let end = words.iter().position(|word| word == "<" || word == ">").unwrap_or(words.len());
    words.truncate(end);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_as_a_shell_does() {
        assert_eq!(words("osb run x -- 'a b' c > d"), ["osb", "run", "x", "--", "a b", "c"]);
        assert!(command_lines().len() > 80);
    }
}
