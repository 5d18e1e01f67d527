//! Changes to how an image wants to be run.

use super::Config;
use super::decompress::digest_of;
use std::collections::BTreeMap;

/// What to set in an image's configuration. What is empty or `None` stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigChange {
    /// Variables to add, or to give another value.
    pub env: Vec<(String, String)>,
    /// Directory that commands start in.
    pub workdir: Option<String>,
    /// `user`, `uid`, `user:group` or `uid:gid`.
    pub user: Option<String>,
    /// First words of the image's own command. Without a new `cmd` the old one goes, as it belonged to the old words.
    pub entrypoint: Option<Vec<String>>,
    /// The words after them.
    pub cmd: Option<Vec<String>>,
    /// Labels to add.
    pub labels: BTreeMap<String, String>,
    /// Ports to add, as `8080/tcp`.
    pub exposed_ports: Vec<String>,
    /// Data directories to add.
    pub volumes: Vec<String>,
    /// Signal that asks the image's program to end.
    pub stop_signal: Option<String>,
}

impl ConfigChange {
    /// Whether it changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn apply(&self, config: &mut Config) {
        for (name, value) in &self.env {
            match config.env.iter_mut().find(|(known, _)| known == name) {
                Some((_, old)) => old.clone_from(value),
                None => config.env.push((name.clone(), value.clone())),
            }
        }
        for (old, new) in [
            (&mut config.workdir, &self.workdir),
            (&mut config.user, &self.user),
            (&mut config.stop_signal, &self.stop_signal),
        ] {
            if new.is_some() {
                old.clone_from(new);
            }
        }
        if let Some(entrypoint) = &self.entrypoint {
            config.entrypoint.clone_from(entrypoint);
            config.cmd.clear();
        }
        if let Some(cmd) = &self.cmd {
            config.cmd.clone_from(cmd);
        }
        config.labels.extend(self.labels.clone());
        for (known, added) in
            [(&mut config.exposed_ports, &self.exposed_ports), (&mut config.volumes, &self.volumes)]
        {
            known.extend(added.iter().cloned());
            known.sort();
            known.dedup();
        }
    }

    /// Id of the image that comes of another by this change.
    pub(super) fn id(&self, base: &str, config: &Config) -> String {
        digest_of(serde_json::json!({ "base": base, "config": config }).to_string().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_changes_and_nothing_else() {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let before = Config {
            env: vec![("PATH".into(), "/bin".into()), ("A".into(), "1".into())],
            entrypoint: words("/entry"),
            cmd: words("-x"),
            user: Some("1".into()),
            volumes: vec!["/data".into()],
            ..Config::default()
        };
        let mut config = before.clone();
        ConfigChange::default().apply(&mut config);
        assert_eq!(config, before);
        let change = ConfigChange {
            env: vec![("A".into(), "2".into()), ("B".into(), String::new())],
            workdir: Some("/work".into()),
            entrypoint: Some(words("/other")),
            volumes: vec!["/cache".into(), "/data".into()],
            labels: BTreeMap::from([("l".into(), "v".into())]),
            exposed_ports: vec!["80/tcp".into()],
            stop_signal: Some("SIGINT".into()),
            ..ConfigChange::default()
        };
        change.apply(&mut config);
        let expected = Config {
            env: vec![("PATH".into(), "/bin".into()), ("A".into(), "2".into()), ("B".into(), String::new())],
            workdir: Some("/work".into()),
            user: Some("1".into()),
            entrypoint: words("/other"),
            volumes: vec!["/cache".into(), "/data".into()],
            labels: change.labels.clone(),
            exposed_ports: vec!["80/tcp".into()],
            stop_signal: Some("SIGINT".into()),
            ..Config::default()
        };
        assert_eq!(config, expected);
        assert_ne!(change.id("sha256:a", &config), change.id("sha256:b", &config));
        let cmd = ConfigChange { cmd: Some(words("a b")), ..ConfigChange::default() };
        cmd.apply(&mut config);
        assert_eq!((config.entrypoint, config.cmd), (words("/other"), words("a b")));
    }
}
