//! Paths as requests spell them.
//!
//! A path comes percent-encoded in the query or as a JSON string. It is decoded exactly once; then `$NAME` and
//! `${NAME}` are replaced from the daemon's environment, then a leading `~`. An undefined variable is an error,
//! never an empty text. `$$` stands for a dollar sign, and an absolute path that exists as it is written is taken
//! as it is written, so that whatever a listing returns can be asked for again.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use axum::extract::FromRequestParts;
use http::request::Parts;
use rustix::fs::{AtFlags, CWD};

use super::error::{FileError, Result};
use crate::accounts::Accounts;
use crate::app::App;

/// A path of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Requested {
    /// As it was sent, for answers and messages; bytes that are not UTF-8 are shown as U+FFFD.
    pub(crate) shown: String,
    /// Absolute, without empty and `.` components. `..` is left to the kernel, which knows about symlinks.
    pub(crate) path: PathBuf,
}

/// What paths are relative to.
pub(crate) trait Surroundings {
    /// Value of an environment variable.
    fn var(&self, name: &str) -> Option<OsString>;
    /// Meaning of `~`.
    fn home(&self) -> OsString;
    /// Where relative paths start.
    fn cwd(&self) -> &Path;
}

impl Surroundings for App {
    fn var(&self, name: &str) -> Option<OsString> {
        self.binding().var(name).map(OsStr::to_owned)
    }

    fn home(&self) -> OsString {
        self.var("HOME").filter(|home| !home.is_empty()).unwrap_or_else(|| {
            let user = self.user.as_deref().unwrap_or_default();
            Accounts::read().resolve(user).map_or_else(|_| "/".into(), |identity| identity.home.into())
        })
    }

    fn cwd(&self) -> &Path {
        &self.cwd
    }
}

impl Requested {
    /// Expands `raw`.
    pub(crate) fn new(raw: &[u8], surroundings: &dyn Surroundings) -> Result<Self> {
        let shown = String::from_utf8_lossy(raw).into_owned();
        if raw.is_empty() {
            return Err(FileError::Invalid("the path is empty".to_owned()));
        }
        if raw.contains(&0) {
            return Err(FileError::Invalid(format!("{shown:?}: a path cannot hold a NUL byte")));
        }
        let literal = Path::new(OsStr::from_bytes(raw));
        let exists = || rustix::fs::statat(CWD, literal, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        let expanded = if raw.contains(&b'$') && !(raw.starts_with(b"/") && exists()) {
            expand_variables(raw, &shown, surroundings)?
        } else {
            raw.to_vec()
        };
        let expanded = expand_home(expanded, surroundings);
        // `components` drops empty and `.` components and the slash at the end.
        let path: PathBuf = surroundings.cwd().join(OsStr::from_bytes(&expanded)).components().collect();
        let path = match super::session::view() {
            Some(view) => view.place(&path, &shown)?,
            None => path,
        };
        Ok(Self { shown, path })
    }

    /// The directory and the last name.
    pub(crate) fn split(&self) -> Result<(&Path, &OsStr)> {
        match (self.path.parent(), self.path.file_name()) {
            (Some(parent), Some(name)) => Ok((parent, name)),
            _ => Err(FileError::Invalid(format!("{}: the path must end in a name", self.shown))),
        }
    }
}

fn expand_variables(raw: &[u8], shown: &str, surroundings: &dyn Surroundings) -> Result<Vec<u8>> {
    let mut expanded = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(dollar) = rest.iter().position(|byte| *byte == b'$') {
        expanded.extend_from_slice(&rest[..dollar]);
        rest = &rest[dollar + 1..];
        let name = match rest.first() {
            Some(b'$') => {
                expanded.push(b'$');
                rest = &rest[1..];
                continue;
            }
            Some(b'{') => {
                let Some(end) = rest.iter().position(|byte| *byte == b'}') else {
                    return Err(FileError::Invalid(format!(
                        "{shown}: '${{' without '}}'; write $$ for a dollar sign"
                    )));
                };
                let name = &rest[1..end];
                if name_length(name) != name.len() || name.is_empty() {
                    return Err(FileError::Invalid(format!(
                        "{shown}: no variable name between '${{' and '}}'; write $$ for a dollar sign"
                    )));
                }
                rest = &rest[end + 1..];
                name
            }
            _ => {
                let length = name_length(rest);
                let (name, after) = rest.split_at(length);
                rest = after;
                name
            }
        };
        if name.is_empty() {
            expanded.push(b'$');
            continue;
        }
        // Names are ASCII by `name_length`.
        let name = String::from_utf8_lossy(name);
        match surroundings.var(&name) {
            Some(value) => expanded.extend_from_slice(value.as_bytes()),
            // As for commands, which get it from the account file where the environment has none.
            None if name == "HOME" => expanded.extend_from_slice(surroundings.home().as_bytes()),
            None => {
                return Err(FileError::Invalid(format!(
                    "{shown}: the variable {name} is not defined in the sandbox; write $$ for a dollar sign"
                )));
            }
        }
    }
    expanded.extend_from_slice(rest);
    Ok(expanded)
}

/// How many bytes at the start form a variable's name.
fn name_length(text: &[u8]) -> usize {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    match text.first() {
        Some(first) if is_part(first) && !first.is_ascii_digit() => {
            text.iter().position(|byte| !is_part(byte)).unwrap_or(text.len())
        }
        _ => 0,
    }
}

fn expand_home(path: Vec<u8>, surroundings: &dyn Surroundings) -> Vec<u8> {
    if path == b"~" || path.starts_with(b"~/") {
        let mut expanded = surroundings.home().into_vec();
        expanded.extend_from_slice(&path[1..]);
        expanded
    } else {
        path
    }
}

/// The query's pairs, decoded once, as bytes: names of files need not be UTF-8.
#[derive(Debug, Clone, Default)]
pub(crate) struct Query(Vec<(Vec<u8>, Vec<u8>)>);

impl Query {
    /// Splits at `&` and the first `=`; `+` is a space; a `%` without two hex digits stands for itself.
    pub(crate) fn parse(query: &str) -> Self {
        let pairs = query.as_bytes().split(|byte| *byte == b'&').filter(|pair| !pair.is_empty());
        Self(
            pairs
                .map(|pair| {
                    let equals = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
                    (decode(&pair[..equals]), decode(pair.get(equals + 1..).unwrap_or_default()))
                })
                .collect(),
        )
    }

    /// All values of a key, empty ones too.
    pub(crate) fn all<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'s [u8]> {
        self.0.iter().filter(move |(key, _)| key == name.as_bytes()).map(|(_, value)| value.as_slice())
    }

    /// The first value of a key that is not empty.
    pub(crate) fn get(&self, name: &str) -> Option<&[u8]> {
        self.0
            .iter()
            .find(|(key, value)| key == name.as_bytes() && !value.is_empty())
            .map(|(_, value)| value.as_slice())
    }

    /// A whole number of at least `least`; absent and empty are `None`.
    pub(crate) fn number(&self, name: &str, least: u64) -> Result<Option<u64>> {
        let Some(raw) = self.get(name) else { return Ok(None) };
        let digits = raw.iter().all(u8::is_ascii_digit);
        let number = std::str::from_utf8(raw).ok().filter(|_| digits).and_then(|text| text.parse().ok());
        match number {
            Some(number) if number >= least => Ok(Some(number)),
            _ => Err(FileError::Invalid(format!("'{name}' must be a whole number from {least}"))),
        }
    }
}

impl FromRequestParts<App> for Query {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> std::result::Result<Self, Self::Rejection> {
        Ok(Self::parse(parts.uri.query().unwrap_or_default()))
    }
}

fn decode(text: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        match first {
            b'+' => decoded.push(b' '),
            b'%' => match (after.first().copied().and_then(hex), after.get(1).copied().and_then(hex)) {
                (Some(high), Some(low)) => {
                    decoded.push(high << 4 | low);
                    rest = &after[2..];
                }
                _ => decoded.push(b'%'),
            },
            byte => decoded.push(*byte),
        }
    }
    decoded
}

fn hex(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct Fixed;

    impl Surroundings for Fixed {
        fn var(&self, name: &str) -> Option<OsString> {
            let value = match name {
                "HOME" => "/home/u",
                "DIR" => "/data/x y",
                "EMPTY" => "",
                "LOOP" => "$DIR",
                "TILDE" => "~",
                _ => return None,
            };
            Some(value.into())
        }

        fn home(&self) -> OsString {
            "/home/u".into()
        }

        fn cwd(&self) -> &Path {
            Path::new("/work")
        }
    }

    fn expand(raw: &str) -> Result<PathBuf> {
        Requested::new(raw.as_bytes(), &Fixed).map(|requested| requested.path)
    }

    #[test]
    fn expands_variables_and_home_once() {
        for (raw, path) in [
            ("/a/b", "/a/b"),
            ("a/b", "/work/a/b"),
            ("./a/./b//c/", "/work/a/b/c"),
            ("/", "/"),
            ("/a/../b", "/a/../b"),
            ("~", "/home/u"),
            ("~/x", "/home/u/x"),
            ("~other/x", "/work/~other/x"),
            ("/a/~/b", "/a/~/b"),
            ("$HOME/x", "/home/u/x"),
            ("${HOME}x", "/home/ux"),
            ("$DIR/f", "/data/x y/f"),
            ("/p/$EMPTY/q", "/p/q"),
            ("$LOOP/q", "/work/$DIR/q"),
            ("$TILDE/q", "/home/u/q"),
            ("/a$", "/a$"),
            ("/a$.txt", "/a$.txt"),
            ("/a$1", "/a$1"),
            ("/a$$HOME", "/a$HOME"),
            ("/a$ü", "/a$ü"),
        ] {
            assert_eq!(expand(raw).unwrap(), Path::new(path), "{raw}");
        }
    }

    #[test]
    fn refuses_what_it_cannot_resolve() {
        for raw in ["", "${UNSET}/x", "$UNSET", "/a/${", "/a/${}", "/a/${a b}", "/a/${1}", "a\0b"] {
            assert!(matches!(expand(raw), Err(FileError::Invalid(_))), "{raw:?}");
        }
        let message = expand("${UNSET}/x").unwrap_err().to_string();
        assert!(message.contains("UNSET") && message.contains("not defined"), "{message}");
    }

    #[test]
    fn an_existing_absolute_path_is_taken_literally() {
        let dir = tempfile::tempdir().unwrap();
        let odd = dir.path().join("$HOME");
        std::fs::write(&odd, "x").unwrap();
        assert_eq!(expand(odd.to_str().unwrap()).unwrap(), odd);
        let absent = dir.path().join("a$HOME");
        assert_eq!(expand(absent.to_str().unwrap()).unwrap(), dir.path().join("a/home/u"));
    }

    #[test]
    fn queries_are_decoded_once() {
        let query =
            Query::parse("path=a+b&path=50%25.txt&&path=%2B%26%3d&path=%252F&path&path=x=y&path=%zz%&n=%ff");
        let values: Vec<_> = query.all("path").map(<[u8]>::to_vec).collect();
        let expected: [&[u8]; 7] = [b"a b", b"50%.txt", b"+&=", b"%2F", b"", b"x=y", b"%zz%"];
        assert_eq!(values, expected);
        assert_eq!(query.get("n"), Some(b"\xff".as_slice()));
        assert_eq!(query.get("none"), None);
    }

    #[test]
    fn numbers_have_a_least_value() {
        let query = Query::parse("a=3&b=0&c=-1&d=x&e=&f=%2B3&g=99999999999999999999");
        assert_eq!(query.number("a", 1).unwrap(), Some(3));
        assert_eq!(query.number("b", 0).unwrap(), Some(0));
        assert_eq!(query.number("e", 1).unwrap(), None);
        for bad in ["b", "c", "d", "f", "g"] {
            assert!(query.number(bad, 1).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_expand_or_are_refused(raw in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Ok(requested) = Requested::new(&raw, &Fixed) {
                prop_assert!(requested.path.is_absolute());
                prop_assert!(!requested.path.as_os_str().as_bytes().contains(&0));
            }
        }

        #[test]
        fn without_dollar_and_tilde_nothing_changes(name in "[^/$~\0]{1,40}") {
            prop_assume!(name != "." && name != "..");
            prop_assert_eq!(expand(&format!("/{name}")).unwrap(), Path::new("/").join(&name));
        }

        #[test]
        fn encoding_and_decoding_are_inverse(raw in proptest::collection::vec(any::<u8>(), 1..40)) {
            let encoded: String = raw.iter().map(|byte| format!("%{byte:02X}")).collect();
            let query = Query::parse(&format!("path={encoded}"));
            prop_assert_eq!(query.get("path"), Some(raw.as_slice()));
        }
    }
}
