//! Shells that keep their state, and terminals.

use serde::{Deserialize, Serialize};

/// Body of `POST /session` and `POST /pty`; may be absent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateSessionRequest {
    /// Working directory; a missing one is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// What a terminal runs instead of an interactive shell. Sessions know no such member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// Answer of `POST /session` and `POST /pty`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionCreated {
    /// Its id.
    pub session_id: String,
}

/// Body of `POST /session/{id}/run`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunInSessionRequest {
    /// Shell text. Early clients call it `code`.
    #[serde(alias = "code")]
    pub command: String,
    /// Working directory of this run and of those after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Milliseconds; 0 or absent is the daemon's own limit of a day. Early clients call it `timeout_ms`.
    #[serde(default, alias = "timeout_ms", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
}

/// Answer of `GET /pty/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalStatus {
    /// Its id.
    pub session_id: String,
    /// Whether its program runs.
    pub running: bool,
    /// Bytes of output so far.
    pub output_offset: u64,
    /// Whether its program was ever started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch_attempted: Option<bool>,
    /// Whether that failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch_failed: Option<bool>,
}

/// First byte of a terminal's binary frames.
pub mod frame {
    /// From the client: input follows.
    pub const STDIN: u8 = 0;
    /// From the server: output of the terminal, or standard output, follows.
    pub const STDOUT: u8 = 1;
    /// From the server: standard error follows.
    pub const STDERR: u8 = 2;
    /// From the server: eight bytes with the offset, big end first, and output from there follow.
    pub const REPLAY: u8 = 3;
}

/// Text frames that a terminal's client sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TerminalRequest {
    /// Input as text.
    Stdin {
        /// The text.
        data: String,
    },
    /// Sends a signal to the program's group.
    Signal {
        /// `SIGINT`, `SIGTERM`, `SIGKILL`, `SIGQUIT` or `SIGHUP`.
        signal: String,
    },
    /// Changes the size.
    Resize {
        /// Columns.
        cols: u16,
        /// Rows.
        rows: u16,
    },
    /// Asks for a sign of life.
    Ping,
}

/// Text frames that a terminal's server sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TerminalMessage {
    /// The connection stands.
    Connected {
        /// Which terminal.
        session_id: String,
        /// `pty` or `pipe`.
        mode: String,
        /// `holder` or `viewer`.
        #[serde(default)]
        role: String,
    },
    /// The program has ended. The connection closes.
    Exit {
        /// Its exit code.
        exit_code: i32,
    },
    /// A request was refused, or the connection ends.
    Error {
        /// For people.
        #[serde(default)]
        error: String,
        /// Stable word.
        #[serde(default)]
        code: String,
    },
    /// Answer to a ping.
    Pong,
    /// A word this version does not know.
    #[serde(other)]
    Unknown,
}
