//! What can go wrong with a file, and the only place where that becomes a status and a code.

use http::StatusCode;
use osb_protocol::execd::code;
use rustix::io::Errno;

use crate::http::ApiError;

/// A failed file operation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    /// Nothing of that name.
    #[error("{0}: no such file or directory")]
    Missing(String),
    /// The request asks for something that cannot be.
    #[error("{0}")]
    Invalid(String),
    /// The contract counts these as failures while running although the request is at fault.
    #[error("{0}")]
    Refused(String),
    /// The system said no.
    #[error("{path}: cannot {action}: {}", describe(*.errno))]
    System {
        /// As the request spells it.
        path: String,
        /// A verb.
        action: &'static str,
        /// The system's reason.
        errno: Errno,
    },
}

pub(crate) type Result<T> = std::result::Result<T, FileError>;

impl FileError {
    /// Sorts the system's answer about `path`.
    pub(crate) fn of(path: &str, action: &'static str, errno: Errno) -> Self {
        match errno {
            // A file in the middle of the path: what lies below it does not exist either.
            Errno::NOENT | Errno::NOTDIR => Self::Missing(path.to_owned()),
            Errno::LOOP => Self::Invalid(format!("{path}: too many symbolic links in the path")),
            Errno::NAMETOOLONG => Self::Invalid(format!("{path}: the path or a name in it is too long")),
            errno => Self::System { path: path.to_owned(), action, errno },
        }
    }

    /// As [`FileError::of`], for the standard library's errors.
    pub(crate) fn of_io(path: &str, action: &'static str, error: &std::io::Error) -> Self {
        Self::of(path, action, error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))
    }
}

fn describe(errno: Errno) -> String {
    match errno {
        Errno::ACCESS | Errno::PERM => "permission denied".to_owned(),
        Errno::NOSPC => "no space left on the file system".to_owned(),
        Errno::DQUOT => "the disk quota is used up".to_owned(),
        Errno::ROFS if super::session::view().is_some() => "denied: workspace is read-only".to_owned(),
        Errno::ROFS => "the file system is read-only".to_owned(),
        Errno::ISDIR => "it is a directory".to_owned(),
        Errno::BUSY => "it is in use, for instance as a mount point".to_owned(),
        Errno::MFILE | Errno::NFILE => "too many open files".to_owned(),
        // The standard library knows the words for the rest.
        errno => std::io::Error::from(errno).to_string(),
    }
}

impl From<FileError> for ApiError {
    fn from(error: FileError) -> Self {
        let (status, code) = match &error {
            FileError::Missing(_) => (StatusCode::NOT_FOUND, code::FILE_NOT_FOUND),
            FileError::Invalid(_) => (StatusCode::BAD_REQUEST, code::INVALID_REQUEST_BODY),
            FileError::Refused(_) | FileError::System { .. } => {
                (StatusCode::INTERNAL_SERVER_ERROR, code::RUNTIME_ERROR)
            }
        };
        ApiError::new(status, code, error.to_string())
    }
}
