//! Code cells.

use serde::{Deserialize, Serialize};

/// Body of `POST /code/context`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeContextRequest {
    /// `python`, `java`, `go`, `typescript`, `javascript`, `bash`.
    pub language: String,
    /// Working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// An interpreter that keeps its state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeContext {
    /// Absent for the default context of the language.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Its language.
    #[serde(default)]
    pub language: String,
    /// Working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// Body of `POST /code`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunCodeRequest {
    /// The cell.
    pub code: String,
    /// Where it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<CodeContext>,
}
