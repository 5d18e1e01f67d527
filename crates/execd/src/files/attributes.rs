//! Mode and owner: how requests spell them and how they are set.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use serde::{Deserialize, Deserializer};

use super::error::{FileError, Result};
use super::temp::errno_of;
use crate::accounts::Accounts;

/// The nine permission bits. Others (set-user-id and so on) are never set through the API.
const PERMISSIONS: u32 = 0o777;

/// Mode and owner as a request gives them. Null and absent members are the same.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Wanted {
    /// Octal digits read as a decimal number; the text `"0644"` is taken too. Zero changes nothing.
    #[serde(default, deserialize_with = "digits")]
    pub(crate) mode: Option<String>,
    /// Name or number; empty changes nothing.
    #[serde(default)]
    pub(crate) owner: Option<String>,
    /// Name or number; empty changes nothing.
    #[serde(default)]
    pub(crate) group: Option<String>,
}

/// What is to be set; `None` stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
}

impl Wanted {
    /// Looks names up.
    pub(crate) fn resolve(&self, accounts: &Accounts) -> Result<Attributes> {
        let mode = self.mode.as_deref().map(mode_from_digits).transpose()?.filter(|mode| *mode != 0);
        let named = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let unknown = |error: crate::accounts::UnknownAccount| FileError::Invalid(error.to_string());
        Ok(Attributes {
            mode,
            uid: named(&self.owner).map(|owner| accounts.uid(&owner)).transpose().map_err(unknown)?,
            gid: named(&self.group).map(|group| accounts.gid(&group)).transpose().map_err(unknown)?,
        })
    }
}

impl Attributes {
    /// Whether nothing is to be set.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What of it a file in this state has not.
    pub(crate) fn beyond(&self, stat: &rustix::fs::Stat) -> Self {
        Self {
            mode: self.mode.filter(|mode| mode & PERMISSIONS != stat.st_mode & 0o7777),
            uid: self.uid.filter(|uid| *uid != stat.st_uid),
            gid: self.gid.filter(|gid| *gid != stat.st_gid),
        }
    }

    /// Sets owner, then mode, of what `fd` refers to. Works on `O_PATH` descriptors.
    pub(crate) fn apply(&self, fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
        if self.uid.is_some() || self.gid.is_some() {
            let uid = self.uid.map(Uid::from_raw);
            rustix::fs::chownat(fd, c"", uid, self.gid.map(Gid::from_raw), AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = self.mode {
            let mode = Mode::from_raw_mode(mode & PERMISSIONS);
            match rustix::fs::fchmod(fd, mode) {
                // `fchmod` does not take an O_PATH descriptor; the magic link does.
                Err(Errno::BADF) => {
                    let linked = super::session::link(fd)
                        .and_then(|(name, links)| rustix::fs::chmodat(links, &*name, mode, AtFlags::empty()));
                    match linked {
                        Err(Errno::NOENT | Errno::NOTDIR) => chmod_without_proc(fd, mode)?,
                        result => result?,
                    }
                }
                result => result?,
            }
        }
        Ok(())
    }
}

/// A system call that the libraries do not know on all machines yet; the number is the same on all.
const FCHMODAT2: libc::c_long = 452;

/// Changes the mode of what an `O_PATH` descriptor refers to where /proc is not mounted.
fn chmod_without_proc(fd: BorrowedFd<'_>, mode: Mode) -> rustix::io::Result<()> {
    // A directory can be opened once more.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    if let Ok(opened) = rustix::fs::openat(fd, c".", flags, Mode::empty()) {
        return rustix::fs::fchmod(opened, mode);
    }
    // SAFETY: the path is a constant, and the descriptor is open. Kernels before 6.6 do not know the call.
    let result =
        unsafe { libc::syscall(FCHMODAT2, fd.as_raw_fd(), c"".as_ptr(), mode.bits(), libc::AT_EMPTY_PATH) };
    if result == 0 {
        return Ok(());
    }
    match errno_of(std::io::Error::last_os_error()) {
        Errno::NOSYS => Err(Errno::OPNOTSUPP),
        errno => Err(errno),
    }
}

/// The decimal number whose digits are the octal mode: 0o644 is 644.
pub(crate) fn mode_to_digits(mode: u32) -> u32 {
    let mode = mode & PERMISSIONS;
    (mode >> 6) * 100 + ((mode >> 3) & 7) * 10 + (mode & 7)
}

fn mode_from_digits(digits: &str) -> Result<u32> {
    let octal = digits.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
    let significant = digits.trim_start_matches('0');
    if digits.is_empty() || !octal || significant.len() > 4 {
        return Err(FileError::Invalid(format!(
            "mode {digits}: give the octal digits of the mode, such as 644 or 755"
        )));
    }
    // At most four octal digits by the check above.
    let mode = significant.bytes().fold(0, |mode, digit| mode << 3 | u32::from(digit - b'0'));
    Ok(mode & PERMISSIONS)
}

fn digits<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Raw {
        Number(serde_json::Number),
        Text(String),
    }
    let raw = Option::<Raw>::deserialize(deserializer)
        .map_err(|_| serde::de::Error::custom("mode must be a number such as 644"))?;
    Ok(match raw {
        Some(Raw::Number(number)) => Some(number.to_string()),
        Some(Raw::Text(text)) if text.is_empty() => None,
        Some(Raw::Text(text)) => Some(text),
        None => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(json: &str) -> Result<Attributes> {
        let accounts = Accounts::parse(b"alice:x:1000:1000::/:\n", b"staff:x:50:\n");
        serde_json::from_str::<Wanted>(json)
            .map_err(|error| FileError::Invalid(error.to_string()))
            .and_then(|wanted| wanted.resolve(&accounts))
    }

    #[test]
    fn digits_spell_the_octal_mode_both_ways() {
        for (json, mode) in [
            ("644", 0o644),
            ("755", 0o755),
            ("420", 0o420),
            ("7", 0o7),
            ("4755", 0o755),
            ("1777", 0o777),
            ("\"0644\"", 0o644),
            ("\"600\"", 0o600),
        ] {
            assert_eq!(resolve(&format!("{{\"mode\":{json}}}")).unwrap().mode, Some(mode), "{json}");
        }
        for json in ["0", "null", "\"\"", "\"0\"", "\"000\""] {
            assert_eq!(resolve(&format!("{{\"mode\":{json}}}")).unwrap().mode, None, "{json}");
        }
        for json in ["8", "648", "-1", "64.5", "77777", "\"0o644\"", "\"rw-\"", "true", "[]", "1e3"] {
            assert!(resolve(&format!("{{\"mode\":{json}}}")).is_err(), "{json}");
        }
        for mode in 0..=0o777 {
            assert_eq!(mode_to_digits(mode).to_string(), format!("{mode:o}"));
        }
        assert_eq!(mode_to_digits(0o104_755), 755);
    }

    #[test]
    fn owners_are_names_or_numbers() {
        let attributes = resolve(r#"{"owner":"alice","group":"staff"}"#).unwrap();
        assert_eq!((attributes.uid, attributes.gid), (Some(1000), Some(50)));
        let attributes = resolve(r#"{"owner":"1234","group":"0"}"#).unwrap();
        assert_eq!((attributes.uid, attributes.gid), (Some(1234), Some(0)));
        assert!(resolve(r#"{"owner":null,"group":"","mode":0}"#).unwrap().is_empty());
        assert!(resolve(r#"{"owner":"bob"}"#).is_err());
        assert!(resolve(r#"{"group":"alice"}"#).is_err());
    }
}
