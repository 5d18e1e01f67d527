//! Everybody below a process that has no PID namespace of its own.

use std::collections::HashMap;

/// Numbers of all living processes that descend from `root`, parents before children.
pub(super) fn of(root: i32) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let Some(parent) = parent(pid) else { continue };
        children.entry(parent).or_default().push(pid);
    }
    let mut found = Vec::new();
    let mut next = children.remove(&root).unwrap_or_default();
    while let Some(pid) = next.pop() {
        found.push(pid);
        next.extend(children.remove(&pid).unwrap_or_default());
    }
    found
}

fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name is in brackets and may hold any byte.
    let behind = stat.iter().rposition(|&byte| byte == b')')?;
    let mut fields = stat.get(behind + 2..)?.split(|&byte| byte == b' ');
    let state = fields.next()?;
    if matches!(state, b"Z" | b"X") {
        return None;
    }
    std::str::from_utf8(fields.next()?).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    #[test]
    fn grandchildren_are_found_and_strangers_are_not() {
        let own = i32::try_from(std::process::id()).unwrap();
        let mut child =
            Command::new("sh").args(["-c", "sleep 345 & wait"]).stdin(Stdio::null()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while super::of(pid).is_empty() {
            assert!(std::time::Instant::now() < end);
            std::thread::yield_now();
        }
        let all = super::of(own);
        assert!(all.contains(&pid) && all.contains(&super::of(pid)[0]) && !all.contains(&1));
        for below in super::of(pid) {
            // SAFETY: our own grandchild, which its parent has not reaped.
            unsafe { libc::kill(below, libc::SIGKILL) };
        }
        child.wait().unwrap();
    }
}
