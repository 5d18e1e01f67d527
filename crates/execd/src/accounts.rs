//! The image's account files, `/etc/passwd` and `/etc/group`.
//!
//! The C library's look-ups are of no use here: a static binary cannot load name service modules, and an image
//! without the files is an ordinary image. Both files belong to the sandbox and may hold anything, so lines that
//! make no sense are passed over, and what is not a regular file of sensible size counts as absent.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};

/// More than this of an account file is not read.
const FILE_LIMIT: u64 = 8 << 20;

/// One line of `/etc/passwd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Home directory; empty when the line has none.
    pub home: String,
    /// Login shell; empty when the line has none.
    pub shell: String,
}

/// One line of `/etc/group`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Name.
    pub name: String,
    /// Group id.
    pub gid: u32,
    /// Login names of its members.
    pub members: Vec<String>,
}

/// Who a process shall run as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary groups, ready for `setgroups`; holds `gid` too.
    pub groups: Vec<u32>,
    /// Login name, when the user has an account.
    pub name: Option<String>,
    /// Home directory; `/` when there is no account or it names none.
    pub home: String,
    /// Login shell, when the account names one.
    pub shell: Option<String>,
}

/// A user or group that the image does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownAccount {
    /// No such user.
    #[error("user {0:?} is not in /etc/passwd; give a name from there or a number")]
    User(String),
    /// No such group.
    #[error("group {0:?} is not in /etc/group; give a name from there or a number")]
    Group(String),
}

/// Both account files, as they were at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Accounts {
    users: Vec<User>,
    groups: Vec<Group>,
    /// Labels are empty.
    unlabelled: bool,
}

/// What this process takes for the image's accounts, if it cannot see them.
static STAND_IN: std::sync::OnceLock<Accounts> = std::sync::OnceLock::new();

/// From now on [`Accounts::read`] gives these.
pub(crate) fn stand_in(accounts: Accounts) {
    let _ = STAND_IN.set(accounts);
}

impl Accounts {
    /// Reads the files of this root. Never fails: what is absent or unreadable is empty.
    #[must_use]
    pub fn read() -> Self {
        STAND_IN.get().cloned().unwrap_or_else(|| Self::read_below(Path::new("/")))
    }

    /// Reads `etc/passwd` and `etc/group` below `root`.
    #[must_use]
    pub fn read_below(root: &Path) -> Self {
        Self::parse(&read_bounded(&root.join("etc/passwd")), &read_bounded(&root.join("etc/group")))
    }

    /// Takes the contents of the two files.
    #[must_use]
    pub fn parse(passwd: &[u8], group: &[u8]) -> Self {
        Self {
            users: String::from_utf8_lossy(passwd).lines().filter_map(parse_user).collect(),
            groups: String::from_utf8_lossy(group).lines().filter_map(parse_group).collect(),
            unlabelled: false,
        }
    }

    /// The same, without a word about whose something is.
    pub(crate) fn without_labels(self) -> Self {
        Self { unlabelled: true, ..self }
    }

    /// The first user of that name.
    #[must_use]
    pub fn user_by_name(&self, name: &str) -> Option<&User> {
        self.users.iter().find(|user| user.name == name)
    }

    /// The first user with that id.
    #[must_use]
    pub fn user_by_id(&self, uid: u32) -> Option<&User> {
        self.users.iter().find(|user| user.uid == uid)
    }

    /// The first group of that name.
    #[must_use]
    pub fn group_by_name(&self, name: &str) -> Option<&Group> {
        self.groups.iter().find(|group| group.name == name)
    }

    /// The first group with that id.
    #[must_use]
    pub fn group_by_id(&self, gid: u32) -> Option<&Group> {
        self.groups.iter().find(|group| group.gid == gid)
    }

    /// The user's primary group and all groups that list it as a member, each once, primary first.
    #[must_use]
    pub fn groups_of(&self, user: &User) -> Vec<u32> {
        let mut gids = vec![user.gid];
        for group in &self.groups {
            if group.members.contains(&user.name) && !gids.contains(&group.gid) {
                gids.push(group.gid);
            }
        }
        gids
    }

    /// Groups that list the user as a member, when a group is asked for by name: that one stands in for the user's own.
    #[must_use]
    pub fn groups_beside(&self, uid: u32, gid: u32) -> Vec<u32> {
        let Some(user) = self.user_by_id(uid) else { return Vec::new() };
        let mut groups = self.groups_of(user);
        groups.retain(|group| *group != user.gid && *group != gid);
        groups
    }

    /// The name of a user, or its number as text.
    #[must_use]
    pub fn user_label(&self, uid: u32) -> String {
        if self.unlabelled {
            return String::new();
        }
        self.user_by_id(uid).map_or_else(|| uid.to_string(), |user| user.name.clone())
    }

    /// The name of a group, or its number as text.
    #[must_use]
    pub fn group_label(&self, gid: u32) -> String {
        if self.unlabelled {
            return String::new();
        }
        self.group_by_id(gid).map_or_else(|| gid.to_string(), |group| group.name.clone())
    }

    /// The id meant by a user's name or number; a name made of digits wins over the number.
    ///
    /// # Errors
    /// The text is neither.
    pub fn uid(&self, text: &str) -> Result<u32, UnknownAccount> {
        self.user_by_name(text)
            .map(|user| user.uid)
            .or_else(|| parse_id(text))
            .ok_or_else(|| UnknownAccount::User(text.to_owned()))
    }

    /// The id meant by a group's name or number; a name made of digits wins over the number.
    ///
    /// # Errors
    /// The text is neither.
    pub fn gid(&self, text: &str) -> Result<u32, UnknownAccount> {
        self.group_by_name(text)
            .map(|group| group.gid)
            .or_else(|| parse_id(text))
            .ok_or_else(|| UnknownAccount::Group(text.to_owned()))
    }

    /// Resolves an image's user: `name`, `uid`, `name:group`, `uid:gid` and mixtures; empty is root. With a group
    /// named, the account's other groups do not apply. A number without an account gets group 0.
    ///
    /// # Errors
    /// A name is in neither file.
    pub fn resolve(&self, spec: &str) -> Result<Identity, UnknownAccount> {
        let (user, group) = match spec.split_once(':') {
            Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
            None => (spec, None),
        };
        let uid = if user.is_empty() { 0 } else { self.uid(user)? };
        let gid = group.map(|group| self.gid(group)).transpose()?;
        // The account by name first: two accounts may share an id.
        Ok(self.identity_of(uid, gid, self.user_by_name(user).or_else(|| self.user_by_id(uid))))
    }

    /// The identity of a user id, with the account's groups, or with `gid` alone when it is given.
    #[must_use]
    pub fn identity(&self, uid: u32, gid: Option<u32>) -> Identity {
        self.identity_of(uid, gid, self.user_by_id(uid))
    }

    fn identity_of(&self, uid: u32, gid: Option<u32>, account: Option<&User>) -> Identity {
        let (gid, groups) = match (gid, account) {
            (Some(gid), _) => (gid, vec![gid]),
            (None, Some(user)) => (user.gid, self.groups_of(user)),
            (None, None) => (0, vec![0]),
        };
        let text = |value: &String| Some(value.clone()).filter(|value| !value.is_empty());
        Identity {
            uid,
            gid,
            groups,
            name: account.map(|user| user.name.clone()),
            home: account.and_then(|user| text(&user.home)).unwrap_or_else(|| "/".to_owned()),
            shell: account.and_then(|user| text(&user.shell)),
        }
    }
}

/// A decimal id. The largest value means "no change" to the kernel and is nobody's id.
fn parse_id(text: &str) -> Option<u32> {
    // `u32::from_str` takes a leading plus sign.
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|id| *id != u32::MAX)
}

fn parse_user(line: &str) -> Option<User> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| is_name(name))?;
    let _password = fields.next()?;
    let uid = parse_id(fields.next()?)?;
    let gid = parse_id(fields.next()?)?;
    let _comment = fields.next();
    let home = fields.next().unwrap_or_default();
    let shell = fields.next().unwrap_or_default();
    Some(User { name: name.to_owned(), uid, gid, home: home.to_owned(), shell: shell.trim_end().to_owned() })
}

fn parse_group(line: &str) -> Option<Group> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| is_name(name))?;
    let _password = fields.next()?;
    let gid = parse_id(fields.next()?.trim_end())?;
    let members = fields.next().unwrap_or_default();
    Some(Group {
        name: name.to_owned(),
        gid,
        members: members
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .collect(),
    })
}

fn is_name(name: &str) -> bool {
    // `+` and `-` lead the lines of NIS, which is not spoken here.
    !name.is_empty() && !name.starts_with(['#', '+', '-'])
}

fn read_bounded(path: &Path) -> Vec<u8> {
    // The sandbox may have put a pipe there: opening must not wait for its writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut content = Vec::new();
    let Ok(fd) = rustix::fs::openat(CWD, path.as_os_str().as_bytes(), flags, Mode::empty()) else {
        return content;
    };
    let regular = rustix::fs::fstat(&fd)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    if regular && File::from(fd).take(FILE_LIMIT).read_to_end(&mut content).is_err() {
        content.clear();
    }
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n# note\n+nis\nalice:x:1000:1000:Alice,,,:/home/alice:/bin/sh\n\
                          bob:x:1001:100::/home/bob\n77:x:5:5::/:\ntwin:x:1000:7::/t:\nbroken:x:abc:0\n:x:1:1::\nbad\n";
    const GROUP: &str =
        "root:x:0:\nusers:x:100:alice, bob\nalice:x:1000:\ndocker:x:999:alice\nempty\nwheel:x:10\n";

    fn accounts() -> Accounts {
        Accounts::parse(PASSWD.as_bytes(), GROUP.as_bytes())
    }

    #[test]
    fn finds_by_name_and_number() {
        let accounts = accounts();
        assert_eq!(accounts.user_by_name("alice").map(|user| user.uid), Some(1000));
        assert_eq!(accounts.user_by_id(1001).map(|user| user.home.as_str()), Some("/home/bob"));
        assert_eq!(accounts.group_by_id(10).map(|group| group.name.as_str()), Some("wheel"));
        assert_eq!(accounts.user_label(1000), "alice");
        assert_eq!(accounts.user_label(4242), "4242");
        assert_eq!(accounts.group_label(999), "docker");
        assert_eq!(accounts.uid("77"), Ok(5), "a name of digits is a name");
        assert_eq!(accounts.uid("78"), Ok(78));
        assert_eq!(accounts.gid("docker"), Ok(999));
        for wrong in ["", "nobody", "+5", "-1", "0x10", "4294967295", "99999999999"] {
            assert!(accounts.uid(wrong).is_err(), "{wrong}");
            assert!(accounts.gid(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn groups_hold_the_primary_one_first_and_once() {
        let accounts = accounts();
        let alice = accounts.user_by_name("alice").unwrap();
        assert_eq!(accounts.groups_of(alice), [1000, 100, 999]);
        let bob = accounts.user_by_name("bob").unwrap();
        assert_eq!(accounts.groups_of(bob), [100]);
    }

    #[test]
    fn resolves_what_images_name() {
        let accounts = accounts();
        let check = |spec: &str, uid: u32, gid: u32, groups: &[u32], home: &str| {
            let identity = accounts.resolve(spec).unwrap();
            assert_eq!((identity.uid, identity.gid), (uid, gid), "{spec}");
            assert_eq!(identity.groups, groups, "{spec}");
            assert_eq!(identity.home, home, "{spec}");
        };
        check("", 0, 0, &[0], "/root");
        check("root", 0, 0, &[0], "/root");
        check("alice", 1000, 1000, &[1000, 100, 999], "/home/alice");
        check("twin", 1000, 7, &[7], "/t");
        check("1000", 1000, 1000, &[1000, 100, 999], "/home/alice");
        check("alice:docker", 1000, 999, &[999], "/home/alice");
        check("1000:5", 1000, 5, &[5], "/home/alice");
        check("65534", 65534, 0, &[0], "/");
        check("65534:65534", 65534, 65534, &[65534], "/");
        check(":100", 0, 100, &[100], "/root");
        check("alice:", 1000, 1000, &[1000, 100, 999], "/home/alice");
        assert_eq!(accounts.resolve("carol"), Err(UnknownAccount::User("carol".to_owned())));
        assert_eq!(accounts.resolve("alice:carol"), Err(UnknownAccount::Group("carol".to_owned())));
    }

    #[test]
    fn an_image_without_files_has_no_accounts() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Accounts::read_below(root.path()), Accounts::default());
        assert_eq!(Accounts::default().resolve("1000:1000").unwrap().home, "/");
    }

    #[test]
    fn a_pipe_in_place_of_the_file_does_not_hang() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("etc")).unwrap();
        let pipe = root.path().join("etc/passwd");
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(Accounts::read_below(root.path()), Accounts::default());
    }
}
