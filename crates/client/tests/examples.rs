//! Every call of the SDK is shown in an example of its file; that examples compile is for the documentation's tests.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

/// Lines of the examples in a file's documentation.
fn examples(source: &str) -> String {
    let mut inside = false;
    let mut text = String::new();
    for line in source.lines().map(str::trim_start) {
        match line.strip_prefix("/// ").or_else(|| line.strip_prefix("//! ")) {
            Some(words) if words.starts_with("```") => inside = !inside,
            Some(words) if inside => text.extend([words, "\n"]),
            Some(_) => {}
            None => inside &= line.starts_with("//"),
        }
    }
    text
}

fn missing(directory: &Path, found: &mut Vec<String>, calls: &mut usize) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            missing(&path, found, calls);
            continue;
        }
        let source = std::fs::read_to_string(&path).unwrap();
        let shown = examples(&source);
        for line in source.lines() {
            let Some(rest) = line.trim_start().strip_prefix("pub async fn ") else { continue };
            let name = rest.split(['(', '<']).next().unwrap();
            *calls += 1;
            if ![".", "::"].iter().any(|before| shown.contains(&format!("{before}{name}("))) {
                found.push(format!("{}: {name}", path.display()));
            }
        }
    }
}

#[test]
fn every_call_is_shown_in_an_example() {
    let (mut found, mut calls) = (Vec::new(), 0);
    missing(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found, &mut calls);
    assert!(calls > 80, "{calls}");
    assert!(found.is_empty(), "{found:#?}");
}
