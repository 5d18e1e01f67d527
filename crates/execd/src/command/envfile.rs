//! The environment file (`EXECD_ENVS`): variables that the client's helpers persist between commands.
//!
//! It is read afresh for each run. One entry per line, later ones win:
//! `KEY=value` (trimmed, `$NAME` replaced), `KEY="…"` (escapes, then `$NAME` replaced; may span lines),
//! `KEY='…'` (as it stands; may span lines). Blank lines and `#` comments are passed over, and so is what is none
//! of these: one bad line must not take the others with it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use rustix::fs::{CWD, FileType, Mode, OFlags};

/// More than this is not read: anybody in the sandbox may write the file.
const FILE_LIMIT: u64 = 2 << 20;
/// No program can be started with a longer `NAME=value`. One such entry would keep every command from starting,
/// also the one that would repair the file.
const ENTRY_LIMIT: usize = (128 << 10) - 2;
/// For the same reason all entries together get no more than this; the kernel's limit is 2 MiB, and arguments and
/// other variables need their part.
const TOTAL_LIMIT: usize = 1 << 20;

/// Entries of the file at `path`, one for each name. A file that is absent or unreadable has none.
#[must_use]
pub fn read<'v>(path: &OsStr, var: impl Fn(&str) -> Option<&'v OsStr>) -> Vec<(OsString, OsString)> {
    // A pipe in its place must not hold the command up.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let Ok(fd) = rustix::fs::openat(CWD, path, flags, Mode::empty()) else { return Vec::new() };
    let regular = rustix::fs::fstat(&fd)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    let mut text = Vec::new();
    if !regular || std::fs::File::from(fd).take(FILE_LIMIT).read_to_end(&mut text).is_err() {
        return Vec::new();
    }
    newest(parse(&text, var))
}

/// The last entry of each name, as far as they fit; the later ones come first.
fn newest(entries: Vec<(OsString, OsString)>) -> Vec<(OsString, OsString)> {
    let mut kept = BTreeMap::new();
    let mut room = TOTAL_LIMIT;
    let mut left_out = 0_usize;
    for (name, value) in entries.into_iter().rev() {
        if kept.contains_key(&name) {
            continue;
        }
        match room.checked_sub(name.len() + value.len()) {
            Some(rest) => {
                room = rest;
                kept.insert(name, value);
            }
            None => left_out += 1,
        }
    }
    if left_out > 0 {
        tracing::warn!(left_out, "entries of the environment file do not fit: {TOTAL_LIMIT} bytes are taken");
    }
    kept.into_iter().collect()
}

/// Parses the file's text into entries in their order.
pub fn parse<'v>(mut text: &[u8], var: impl Fn(&str) -> Option<&'v OsStr>) -> Vec<(OsString, OsString)> {
    let mut entries = Vec::new();
    while !text.is_empty() {
        let line_end = text.iter().position(|&byte| byte == b'\n').unwrap_or(text.len());
        let next_line = text.get(line_end + 1..).unwrap_or_default();
        let parsed = entry(text, line_end, &var);
        text = match parsed {
            Some((key, value, rest)) => {
                // An exec could take neither, and the other entries are still good.
                if value.contains(&0) || key.len() + value.len() > ENTRY_LIMIT {
                    tracing::warn!(name = ?OsStr::from_bytes(key), "an entry of the environment file is too long or holds a NUL byte");
                } else {
                    entries.push((OsStr::from_bytes(key).to_owned(), OsString::from_vec(value)));
                }
                rest
            }
            None => next_line,
        };
    }
    entries
}

/// The entry that starts at `text`, and what follows it. `None` when there is none.
fn entry<'t, 'v>(
    text: &'t [u8],
    line_end: usize,
    var: &impl Fn(&str) -> Option<&'v OsStr>,
) -> Option<(&'t [u8], Vec<u8>, &'t [u8])> {
    let line = &text[..line_end];
    let equals = line.iter().position(|&byte| byte == b'=')?;
    let key = line[..equals].trim_ascii();
    if !is_name(key) {
        return None;
    }
    let blank = line[equals + 1..].iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    let value = &text[equals + 1 + blank..];
    match value.first() {
        Some(b'\'') => {
            let length = value[1..].iter().position(|&byte| byte == b'\'')?;
            let rest = after_quote(&value[length + 2..])?;
            Some((key, value[1..=length].to_vec(), rest))
        }
        Some(b'"') => {
            let (unescaped, rest) = double_quoted(&value[1..])?;
            Some((key, expand(&unescaped, var), after_quote(rest)?))
        }
        _ => {
            let plain = line[equals + 1..].trim_ascii();
            Some((key, expand(plain, var), text.get(line_end + 1..).unwrap_or_default()))
        }
    }
}

/// Text up to the closing quote, with its escapes done, and what follows the quote.
fn double_quoted(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut value = Vec::new();
    let mut bytes = text.iter().enumerate();
    while let Some((at, &byte)) = bytes.next() {
        match byte {
            b'"' => return Some((value, &text[at + 1..])),
            b'\\' => match bytes.next()?.1 {
                b'n' => value.push(b'\n'),
                b'r' => value.push(b'\r'),
                b't' => value.push(b'\t'),
                escaped @ (b'\\' | b'"') => value.push(*escaped),
                other => value.extend_from_slice(&[b'\\', *other]),
            },
            _ => value.push(byte),
        }
    }
    None
}

/// The next line, provided that nothing but blanks or a comment follows the closing quote.
fn after_quote(rest: &[u8]) -> Option<&[u8]> {
    let end = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
    let tail = rest[..end].trim_ascii();
    (tail.is_empty() || tail.starts_with(b"#")).then(|| rest.get(end + 1..).unwrap_or_default())
}

/// Replaces `$NAME` and `${NAME}`; an undefined variable is empty, and a `$` before anything else stays. What is
/// too long anyway is not completed: each `$NAME` may stand for much text.
fn expand<'v>(text: &[u8], var: &impl Fn(&str) -> Option<&'v OsStr>) -> Vec<u8> {
    let mut expanded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.iter().position(|&byte| byte == b'$') {
        expanded.extend_from_slice(&rest[..dollar]);
        rest = &rest[dollar + 1..];
        if expanded.len() > ENTRY_LIMIT {
            return expanded;
        }
        let braced = rest.first() == Some(&b'{');
        let name = &rest[usize::from(braced)..];
        let length = name.iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_').count();
        let (name, behind) = name.split_at(length);
        // A brace that is not closed right behind the name opens nothing.
        let name = if braced && behind.first() != Some(&b'}') { &[] } else { name };
        let length = name.len() + 2 * usize::from(braced);
        match std::str::from_utf8(name) {
            Ok(name) if is_name(name.as_bytes()) => {
                expanded.extend_from_slice(var(name).map(OsStr::as_bytes).unwrap_or_default());
                rest = &rest[length..];
            }
            _ => expanded.push(b'$'),
        }
    }
    expanded.extend_from_slice(rest);
    expanded
}

/// Whether a shell could use this as a variable's name.
#[must_use]
pub fn is_name(name: &[u8]) -> bool {
    name.first().is_some_and(|first| !first.is_ascii_digit())
        && name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(text: &str) -> Vec<(String, String)> {
        let home = OsStr::new("/home/a");
        let text = parse(text.as_bytes(), |name| (name == "HOME").then_some(home));
        text.into_iter()
            .map(|(key, value)| (key.into_string().unwrap(), value.into_string().unwrap()))
            .collect()
    }

    fn one(text: &str, value: &str) {
        assert_eq!(parsed(text), [("K".to_owned(), value.to_owned())], "{text}");
    }

    #[test]
    fn the_three_forms() {
        one("K=value", "value");
        one("  K =  a b  \n", "a b");
        one("K=$HOME/x${HOME}$NONE$", "/home/a/x/home/a$");
        one("K=", "");
        one("K=a=b", "a=b");
        one(r#"K=" a\n\t\\\"\x $HOME ""#, " a\n\t\\\"\\x /home/a ");
        one("K=\"two\nlines\" # note\n", "two\nlines");
        one("K='$HOME \\n \"\nx'", "$HOME \\n \"\nx");
        one("K=it's", "it's");
        one("K=${HOME", "${HOME");
    }

    #[test]
    fn what_makes_no_sense_is_passed_over() {
        let text = "# note\n\nexport A=1\n1B=2\n=3\nnothing\nC='x' y\nD=\"open\nE=5\nF='open\nG=7\0\nH=8";
        assert_eq!(
            parsed(text),
            [("E".into(), "5".into()), ("H".into(), "8".into())] as [(String, String); 2]
        );
    }

    #[test]
    fn what_no_program_could_start_with_is_passed_over() {
        let long = "x".repeat(ENTRY_LIMIT);
        assert_eq!(parsed(&format!("A={long}\nB=1")), [("B".to_owned(), "1".to_owned())]);
        assert_eq!(parsed(&format!("A={}\nB=1", &long[1..])).len(), 2);
        let home = OsString::from("h".repeat(100_000));
        let text = format!("A={}\nB=$HOME", "$HOME".repeat(400_000));
        let entries = parse(text.as_bytes(), |_| Some(&home));
        assert_eq!(entries, [("B".into(), home.clone())] as [(OsString, OsString); 1]);
        let many: String = (0..40).map(|n| format!("K{n}={}\n", &long[..50_000])).collect();
        let kept = newest(parse(format!("{many}K39=short").as_bytes(), |_| None));
        assert!(kept.contains(&("K39".into(), "short".into())) && !kept.iter().any(|(name, _)| name == "K0"));
        assert!((20..=21).contains(&kept.len()), "{}", kept.len());
    }

    #[test]
    fn a_hostile_file_takes_no_time() {
        let used = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).tv_sec;
        let before = used();
        for unit in ["${", "${A", "$", "K=\"", "K='\n", "K=\"\\\n", "K=${\n", "${A}"] {
            let text = format!("K={}", unit.repeat(FILE_LIMIT as usize / unit.len()));
            parse(text.as_bytes(), |_| None);
        }
        assert!(used() - before < 10);
    }

    #[test]
    fn later_entries_come_later() {
        assert_eq!(
            parsed("A=1\nA='2'"),
            [("A".into(), "1".into()), ("A".into(), "2".into())] as [(String, String); 2]
        );
    }

    proptest! {
        #[test]
        fn single_quotes_lose_nothing(value in "[^'\0]*") {
            prop_assert_eq!(parsed(&format!("K='{value}'\nL=1")), vec![
                ("K".to_owned(), value), ("L".to_owned(), "1".to_owned()),
            ]);
        }

        #[test]
        fn any_text_parses(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&text, |_| None);
        }
    }
}
