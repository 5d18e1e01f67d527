//! Splits a line into words by the quoting rules of the POSIX shell, without any expansion.

/// The words; `None` when a quotation mark stays open or a backslash ends the line.
pub(crate) fn split(line: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            ' ' | '\t' | '\n' | '\r' => words.extend(word.take()),
            '\\' => {
                let next = chars.next()?;
                let word = word.get_or_insert_default();
                if next != '\n' {
                    word.push(next);
                }
            }
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next()? {
                        '\'' => break,
                        c => word.push(c),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next()? {
                        '"' => break,
                        '\\' => match chars.next()? {
                            '\n' => {}
                            c @ ('"' | '\\' | '$' | '`') => word.push(c),
                            c => word.extend(['\\', c]),
                        },
                        c => word.push(c),
                    }
                }
            }
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn words_as_the_shell_has_them() {
        for (line, words) in [
            ("python -m http.server", &["python", "-m", "http.server"][..]),
            ("  a\t b\n", &["a", "b"]),
            ("sh -c 'echo \"x y\"; sleep 1'", &["sh", "-c", "echo \"x y\"; sleep 1"]),
            (r#"a "b \"c\" \x $d" e\ f"#, &["a", r#"b "c" \x $d"#, "e f"]),
            ("a '' \"\"", &["a", "", ""]),
            ("a'b'\"c\"d", &["abcd"]),
            ("   ", &[]),
        ] {
            assert_eq!(split(line).unwrap(), words, "{line}");
        }
        for line in ["a 'b", "a \"b", "a \\", "\"\\"] {
            assert_eq!(split(line), None, "{line}");
        }
    }
}
