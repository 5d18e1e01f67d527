//! The text that the shell of an isolated session is fed.
//!
//! The shell reads from a pipe and is interactive, though it has no terminal: that alone makes it give up a command as
//! a whole when it is interrupted, and read on. A run's code lies in a file that the shell reads as if it were told to
//! by a user, so that it says nothing of its own about jobs. As in [`crate::session`], it speaks to us through a named
//! pipe that no program of a run has open.

use crate::session::script::quoted;

/// Which shell it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// GNU bash.
    Bash,
    /// What the image has as `sh`.
    Sh,
}

impl Kind {
    /// Its arguments.
    pub(super) fn argv(self) -> Vec<String> {
        let words: &[&str] = match self {
            Self::Bash => &["bash", "--noprofile", "--norc", "--noediting", "-i"],
            Self::Sh => &["sh", "-i"],
        };
        words.iter().map(|&word| word.to_owned()).collect()
    }

    /// First text.
    pub(super) fn begin(self) -> &'static [u8] {
        match self {
            Self::Bash => {
                b"\\set +o histexpand +o history; \\unset HISTFILE MAILCHECK TMOUT PROMPT_COMMAND PS0 PS1 PS2\n"
            }
            Self::Sh => b"PS1= PS2=\n",
        }
    }
}

/// What one run needs. Names are those of files in the directory of pipes.
#[derive(Debug)]
pub(super) struct Run<'a> {
    /// Its mark in the shell's words.
    pub(super) mark: &'a str,
    /// Directory of pipes, as the session sees it.
    pub(super) dir: &'a str,
    /// Named pipe of its output.
    pub(super) output: &'a str,
    /// File of its code.
    pub(super) code: &'a str,
    /// Variables for it alone: with some of them it runs in a shell of its own.
    pub(super) envs: &'a [(String, String)],
}

impl Run<'_> {
    fn path(&self, name: &str) -> Vec<u8> {
        quoted(format!("{}/{name}", self.dir).as_bytes())
    }

    /// The words that read the code.
    fn source(&self) -> Vec<u8> {
        let mut out = Vec::new();
        if self.envs.is_empty() {
            out.extend_from_slice(b"\\. ");
            out.extend(self.path(self.code));
            return out;
        }
        out.extend_from_slice(b"( ");
        for (name, value) in self.envs {
            out.extend_from_slice(format!("\\export {name}=").as_bytes());
            out.extend(quoted(value.as_bytes()));
            out.extend_from_slice(b"; ");
        }
        out.extend_from_slice(b"\\. ");
        out.extend(self.path(self.code));
        out.extend_from_slice(b" )");
        out
    }

    /// A run that the shell waits for.
    pub(super) fn foreground(&self) -> Vec<u8> {
        let mut out = self.source();
        out.extend_from_slice(b" </dev/null >|");
        out.extend(self.path(self.output));
        out.extend_from_slice(b" 2>&1\n");
        out.extend(self.report());
        out
    }

    /// Has the shell say how the last command ended. Whatever somebody else has said before is no part of it. May be said again when it was interrupted, which may have made it
    /// forget what it had read.
    pub(super) fn report(&self) -> Vec<u8> {
        let mut out = format!("\\command printf '\\0R{} %d %s\\0' \"$?\" \"$-\" 1<>", self.mark).into_bytes();
        out.extend(self.path("control"));
        out.push(b'\n');
        out
    }

    /// A run that goes on beside the shell. It says its process first, and at its end how that was.
    pub(super) fn background(&self) -> Vec<u8> {
        // What interrupts a run in the foreground reaches the whole group.
        let mut out = b"{ ( \\trap '' INT; ".to_vec();
        out.extend(self.source());
        out.extend_from_slice(b" ); ");
        out.extend(self.report());
        out.pop();
        out.extend_from_slice(b"; } </dev/null >|");
        out.extend(self.path(self.output));
        out.extend_from_slice(
            format!(" 2>&1 & \\command printf '\\0R{}.pid %d %s\\0' \"$!\" \"$-\" 1<>", self.mark).as_bytes(),
        );
        out.extend(self.path("control"));
        out.push(b'\n');
        out
    }
}
