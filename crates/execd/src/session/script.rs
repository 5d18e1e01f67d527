//! The text that a session's shell is fed: what runs a command, tells its end, and saves and restores the state.
//!
//! The shell reads this text from a pipe that nothing it starts inherits, and speaks to us through a named pipe that
//! it opens for each word it says. So neither lies open while a command runs, and what the command does with its
//! descriptors cannot touch them. Words of the shell are quoted or given to `command`, because users define aliases
//! and functions.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Text up to this length goes through the pipe, of which bash reads each byte by itself. Longer ones are left in a
/// file.
pub(super) const LONGEST_FED: usize = 16 << 10;

/// Which shell it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// GNU bash.
    Bash,
    /// What the image has as `sh`.
    Sh,
}

/// A command's text, or the file that holds it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Text<'a> {
    /// The text itself.
    Fed(&'a [u8]),
    /// Where it lies.
    File(&'a Path),
}

/// Names of what lies in the session's directory.
#[derive(Debug)]
pub(super) struct Names {
    /// Named pipe of the shell's words to us.
    pub(super) control: Vec<u8>,
    /// Named pipe of a run's output.
    pub(super) output: Vec<u8>,
    /// Files in which runs leave the shell's state in turn: one that is broken off while it is written leaves the one
    /// before.
    pub(super) saved: [Vec<u8>; 2],
    /// File in which a shell that ends leaves its state.
    pub(super) last: Vec<u8>,
}

/// Whose state it is that the shell leaves.
#[derive(Debug, Clone, Copy)]
enum Saved {
    /// That of a run.
    Run(u64),
    /// Its own last one.
    Last,
}

/// What one run needs.
#[derive(Debug)]
pub(super) struct Run<'a> {
    /// Its mark in the shell's words.
    pub(super) mark: &'a str,
    /// Its number in the session.
    pub(super) number: u64,
    /// The command.
    pub(super) text: Text<'a>,
    /// Directory to enter first.
    pub(super) cwd: Option<&'a OsStr>,
    /// What `$?` shows at its start.
    pub(super) status: i32,
    /// Options that were on when the last run ended and are off between runs.
    pub(super) tracing: &'a str,
    /// Variables that have come into the sandbox's file: name, value before, value now.
    pub(super) variables: &'a [(OsString, Option<OsString>, OsString)],
    /// Mark of the run's processes, when it has to set that itself.
    pub(super) tag: Option<u64>,
}

/// A single word that means exactly these bytes.
pub(crate) fn quoted(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + 2);
    out.push(b'\'');
    for piece in bytes.split_inclusive(|&byte| byte == b'\'') {
        match piece.strip_suffix(b"'") {
            Some(plain) => {
                out.extend_from_slice(plain);
                out.extend_from_slice(b"'\\''");
            }
            None => out.extend_from_slice(piece),
        }
    }
    out.push(b'\'');
    out
}

impl Kind {
    /// Arguments of a shell that reads what it is to do from standard input.
    pub(super) fn argv(self) -> &'static [&'static str] {
        match self {
            Self::Bash => &["bash", "--noprofile", "--norc"],
            Self::Sh => &["sh"],
        }
    }

    /// First text of a new shell. `state` is what an earlier one has left behind, `start` where the session began.
    pub(super) fn begin(self, names: &Names, state: Option<Text<'_>>, start: &OsStr) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(state) = state {
            out.extend_from_slice(b"{ ");
            self.push_eval(&mut out, b"", state);
            out.extend_from_slice(
                b"\n__execd_s=${OLDPWD-}; \\command cd -- \"$PWD\" && OLDPWD=$__execd_s || \\command cd -- ",
            );
            out.extend(quoted(start.as_bytes()));
            out.extend_from_slice(b"; } </dev/null >/dev/null 2>&1\n");
        }
        let mut last = self.save(names, Saved::Last);
        last.retain(|&byte| byte != b'\n');
        out.extend_from_slice(b"\\trap ");
        out.extend(quoted(&last));
        out.extend_from_slice(b" EXIT; \\unset __execd_s\n");
        out
    }

    /// Text of one run. The shell says `B` and the mark when it begins, `R`, mark, status and options at its end, and
    /// then leaves what it has become.
    pub(super) fn run(self, names: &Names, run: &Run<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(tag) = run.tag {
            out.extend_from_slice(format!("\\command ulimit -S -R {tag}\n").as_bytes());
        }
        for (name, before, now) in run.variables {
            let (name, now) = (name.as_bytes(), quoted(now.as_bytes()));
            let (test, pattern) = match before {
                Some(before) => (&b"-}"[..], quoted(before.as_bytes())),
                None => (&b"+x}"[..], b"''".to_vec()),
            };
            out.extend([b"case ${", name, test, b" in ", &pattern, b") \\command export "].concat());
            out.extend([name, b"=", &now, b";; esac\n"].concat());
        }
        out.extend_from_slice(b"{ ");
        push_word(&mut out, names, &format!("'B{}\\0'", run.mark));
        if let Some(cwd) = run.cwd {
            out.extend_from_slice(b" && \\command cd -- ");
            out.extend(quoted(cwd.as_bytes()));
        }
        out.extend_from_slice(b" && ");
        // On the line where the command begins, so that its lines are counted as they are.
        let prelude = match (run.tracing, run.status) {
            ("", 0) => String::new(),
            ("", status) => format!("(exit {status}) && :; "),
            (options, _) => format!("set -{options}; "),
        };
        self.push_eval(&mut out, prelude.as_bytes(), run.text);
        out.extend_from_slice(b"\n} </dev/null >|");
        out.extend(quoted(&names.output));
        out.extend_from_slice(b" 2>&1\n__execd_s=$?; ");
        push_word(&mut out, names, &format!("'R{} %d %s\\0' \"$__execd_s\" \"$-\"", run.mark));
        out.extend_from_slice(
            b" || { \\trap - EXIT; \\exit \"$__execd_s\"; }; \\set +xv; \\unset __execd_s\n",
        );
        out.extend(self.save(names, Saved::Run(run.number)));
        out
    }

    fn push_eval(self, out: &mut Vec<u8>, prelude: &[u8], text: Text<'_>) {
        out.extend_from_slice(match self {
            Self::Bash => b"\\eval ",
            // Without `command` a mistake in the text would end the shell.
            Self::Sh => b"\\command eval ",
        });
        match text {
            Text::Fed(text) => out.extend(quoted(&[prelude, text].concat())),
            Text::File(path) => {
                let read: &[u8] = if self == Self::Bash { b"$(<" } else { b"$(\\command cat " };
                out.extend(quoted(prelude));
                out.extend([b"\"", read, &quoted(path.as_os_str().as_bytes()), b")\""].concat());
            }
        }
    }

    /// Text that writes the shell's state, as text that restores it, into a file: the run's number in a line, the
    /// state, and a NUL byte. Bash writes line by line, which would wake us a hundred times if it were a pipe.
    fn save(self, names: &Names, whose: Saved) -> Vec<u8> {
        let parts: &[u8] = match self {
            Self::Bash => {
                b"\\command declare -p; \\command declare -f; \\command declare -F; \\command alias -p; \
                  \\command shopt -p; "
            }
            Self::Sh => b"\\command export -p; ",
        };
        let (number, file) = match whose {
            Saved::Run(number) => (number, &names.saved[usize::from(number % 2 == 1)]),
            Saved::Last => (u64::MAX, &names.last),
        };
        let mut out = format!("{{ \\command echo {number}; ").into_bytes();
        out.extend_from_slice(parts);
        // Options come last: one of them may be to end at the first failure.
        out.extend_from_slice(
            b"\\command printf 'umask '; \\command umask; \\command trap; \\command set +o; \
              \\command printf '\\0'; } 2>/dev/null >|",
        );
        out.extend(quoted(file));
        out.extend_from_slice(b" || :\n");
        out
    }
}

/// A `printf` of these arguments into the control pipe. It is opened for reading as well, which never waits.
fn push_word(out: &mut Vec<u8>, names: &Names, arguments: &str) {
    out.extend([b"\\command printf ", arguments.as_bytes(), b" 1<>", &quoted(&names.control)].concat());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_quoted_word_is_itself(bytes in proptest::collection::vec(1u8..=255, 0..200)) {
            for shell in ["bash", "sh"] {
                let script = [b"printf %s ", quoted(&bytes).as_slice()].concat();
                let script = std::ffi::OsStr::from_bytes(&script);
                let run = std::process::Command::new(shell).arg("-c").arg(script).output().unwrap();
                prop_assert_eq!(&run.stdout, &bytes);
            }
        }
    }

    #[test]
    fn quotes_and_ends() {
        assert_eq!(quoted(b""), b"''");
        assert_eq!(quoted(b"it's"), b"'it'\\''s'");
        assert_eq!(quoted(b"'"), b"''\\'''");
    }
}
