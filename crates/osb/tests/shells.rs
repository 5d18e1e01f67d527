//! Completions in the shells themselves, and manual pages as `man` reads them. What is not installed is skipped.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

use std::path::Path;
use std::process::{Command, Output};

const OSB: &str = env!("CARGO_BIN_EXE_osb");

/// Whether a program is there; says so if not.
fn there(name: &str) -> bool {
    let there = Path::new("/usr/bin").join(name).exists();
    if !there {
        eprintln!("skipped: {name} is not installed");
    }
    there
}

fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program)
        .args(args)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("TERM", "dumb")
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The shell's completions in a file of their own.
fn completions(directory: &Path, shell: &str) -> String {
    let path = directory.join(format!("_osb.{shell}"));
    std::fs::write(&path, run(OSB, &["completions", shell]).stdout).unwrap();
    path.display().to_string()
}

#[test]
fn bash_completes_commands_and_options() {
    if !there("bash") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = completions(dir.path(), "bash");
    for (words, expected) in [
        ("osb sandb", "sandbox"),
        ("osb sandbox crea", "create"),
        ("osb sandbox create --skip-h", "--skip-health-check"),
        ("osb --no-color sandbox list -o js", "json"),
    ] {
        let script = format!(
            "source {file}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _osb osb \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        let output = run("bash", &["--norc", "-c", &script]);
        assert_eq!(text(&output).trim(), expected, "{words}");
    }
}

#[test]
fn zsh_completes_commands_and_options() {
    if !there("zsh") || !there("script") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = completions(dir.path(), "zsh");
    // Typed at a terminal, as completions work nowhere else; a function shows what the line has become.
    let typed = format!(
        "PS1=; autoload -Uz compinit; compinit -u -D; source {file}; compdef _osb osb; osb() {{ print GOT:$*:END }}\n\
         osb sandb\tcrea\t--skip-h\t\nosb port-f\t\nexit\n"
    );
    let input = dir.path().join("typed");
    std::fs::write(&input, typed).unwrap();
    let line = format!(
        "(sleep 1; while IFS= read -r line; do printf '%s\\n' \"$line\"; sleep 1; done <{}) | \
        script -qc 'zsh -f -i' /dev/null",
        input.display()
    );
    let shown = text(&run("bash", &["--norc", "-c", &line]));
    assert!(shown.contains("GOT:sandbox create --skip-health-check:END"), "{shown}");
    assert!(shown.contains("GOT:port-forward:END"), "{shown}");
}

#[test]
fn fish_completes_commands_and_options() {
    if !there("fish") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = completions(dir.path(), "fish");
    for (words, expected) in [
        ("osb sandb", "sandbox"),
        ("osb sandbox crea", "create"),
        ("osb sandbox create --skip-h", "--skip-health-check"),
    ] {
        let script = format!("source {file}; complete -C '{words}'");
        let output = Command::new("fish")
            .args(["--no-config", "-c", &script])
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", dir.path())
            .output()
            .unwrap();
        let shown = text(&output);
        assert!(shown.lines().any(|line| line.split('\t').next() == Some(expected)), "{words}: {shown}");
    }
}

#[test]
fn man_finds_nothing_to_warn_of() {
    if !there("man") || !there("groff") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    assert!(run(OSB, &["man", dir.path().to_str().unwrap()]).status.success());
    let mut pages = 0;
    for page in std::fs::read_dir(dir.path()).unwrap() {
        let page = page.unwrap().path().display().to_string();
        let output = run("man", &["--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", &page]);
        assert!(output.status.success() && output.stdout.len() > 500, "{page}: {}", text(&output));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{page}");
        pages += 1;
    }
    assert!(pages > 50, "{pages}");
}
