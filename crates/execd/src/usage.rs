//! Statistics of the work's cgroup that init and daemon both need.

use std::os::fd::{BorrowedFd, RawFd};

/// Out-of-memory kills so far: the line `oom_kill N` of `memory.oom_control` (v1) or `memory.events` (v2), which
/// the engine has opened for us.
#[must_use]
pub fn oom_kills(fd: RawFd) -> Option<u64> {
    if fd < 0 {
        return None;
    }
    // SAFETY: the engine handed the descriptor over for the life of this process; nothing here closes it.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut text = [0u8; 1024];
    let length = rustix::io::pread(file, &mut text, 0).ok()?;
    parse(std::str::from_utf8(&text[..length]).ok()?)
}

fn parse(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_the_file() {
        assert_eq!(parse("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), Some(3));
        assert_eq!(parse("low 0\nhigh 0\nmax 4\noom 2\noom_kill 1\noom_group_kill 0\n"), Some(1));
        assert_eq!(parse("nothing"), None);
        assert_eq!(oom_kills(-1), None);
    }
}
