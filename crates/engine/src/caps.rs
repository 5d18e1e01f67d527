//! Linux capabilities of a sandbox.

/// A set of capabilities as the kernel's bit mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapSet(pub u64);

/// Names by number, without `CAP_`.
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// What container engines usually leave: the most a sandbox can have.
const USUAL: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// Dropped unless the configuration says otherwise.
pub const DEFAULT_DROP: [&str; 9] = [
    "AUDIT_WRITE",
    "MKNOD",
    "NET_ADMIN",
    "NET_RAW",
    "SYS_ADMIN",
    "SYS_MODULE",
    "SYS_PTRACE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
];

/// A word that names no capability.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a capability: names such as NET_RAW are expected")]
pub struct UnknownCapability(pub String);

impl CapSet {
    /// The usual fourteen less those of `drop` (case and a leading `CAP_` do not matter).
    pub fn usual_without<S: AsRef<str>>(drop: &[S]) -> Result<Self, UnknownCapability> {
        let mut set = USUAL.iter().fold(0, |set, name| set | bit(name).unwrap_or(0));
        for word in drop {
            let upper = word.as_ref().trim().to_ascii_uppercase();
            let name = upper.strip_prefix("CAP_").unwrap_or(&upper);
            set &= !bit(name).ok_or_else(|| UnknownCapability(word.as_ref().to_owned()))?;
        }
        Ok(Self(set))
    }

    /// The set less one capability.
    #[must_use]
    pub fn without(self, name: &str) -> Self {
        Self(self.0 & !bit(name).unwrap_or(0))
    }
}

fn bit(name: &str) -> Option<u64> {
    NAMES.iter().position(|known| *known == name).map(|number| 1 << number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_beyond_the_usual_fourteen() {
        let all = CapSet::usual_without::<&str>(&[]).unwrap();
        assert_eq!(all.0.count_ones(), 14);
        // What Docker gives, as a number everybody can look up.
        assert_eq!(all.0, 0xa804_25fb);
    }

    #[test]
    fn the_contracts_list_leaves_eleven() {
        let left = CapSet::usual_without(&DEFAULT_DROP).unwrap();
        assert_eq!(left.0.count_ones(), 11);
        assert_eq!(CapSet::usual_without(&["cap_mknod", "Net_Raw", "AUDIT_WRITE"]), Ok(left));
        assert_eq!(CapSet::usual_without(&["NET_RAWW"]), Err(UnknownCapability("NET_RAWW".into())));
    }
}
