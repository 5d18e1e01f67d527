//! Files of skills: where each tool looks, and how they get there and away.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::{Value, json};

use super::{Scope, Skill, Target};
use crate::output::{Cell, Row};

/// What became of a skill at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Installed,
    Updated,
    AlreadyPresent,
    Removed,
    NotInstalled,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Self::Installed => "installed",
            Self::Updated => "updated",
            Self::AlreadyPresent => "already_present",
            Self::Removed => "removed",
            Self::NotInstalled => "not_installed",
        }
    }

    pub(super) fn is_change(self) -> bool {
        matches!(self, Self::Installed | Self::Updated | Self::Removed)
    }
}

/// A skill at a place.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) skill: Skill,
    pub(super) target: Target,
    pub(super) scope: Scope,
    pub(super) path: PathBuf,
    pub(super) status: Status,
}

impl Operation {
    pub(super) fn row(&self) -> Row {
        vec![
            Cell::from(self.skill.name()),
            Cell::from(self.target.label()),
            Cell::from(self.scope.name()),
            Cell::from(self.status.name()),
            Cell::from(self.path.display()),
        ]
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "skill": self.skill.name(),
            "target": self.target.name(),
            "target_label": self.target.label(),
            "scope": self.scope.name(),
            "path": self.path.display().to_string(),
            "status": self.status.name(),
            "requires_restart": self.status.is_change(),
        })
    }
}

/// How a tool keeps skills.
enum Place {
    /// A file for each.
    Own(PathBuf, String),
    /// A marked block in a file that is shared with others.
    Block(PathBuf),
}

fn place(root: &Path, target: Target, skill: Skill) -> Place {
    let name = skill.name();
    let whole = || skill.text().to_owned();
    match target {
        Target::Cursor => Place::Own(root.join(format!(".cursor/rules/{name}.mdc")), skill.body().to_owned()),
        Target::Codex => Place::Own(root.join(format!(".codex/skills/{name}/SKILL.md")), whole()),
        Target::Opencode => Place::Own(root.join(format!(".agents/skills/{name}/SKILL.md")), whole()),
        Target::Copilot => Place::Block(root.join(".github/copilot-instructions.md")),
        Target::Windsurf => Place::Block(root.join(".windsurfrules")),
        Target::Cline => Place::Block(root.join(".clinerules")),
        Target::Claude | Target::All => Place::Own(root.join(format!(".claude/skills/{name}.md")), whole()),
    }
}

/// How a tool keeps skills, with `operation`'s as the example.
pub(super) fn layout(operation: &Operation) -> String {
    let path = operation.path.display().to_string();
    match place(Path::new(""), operation.target, operation.skill) {
        Place::Own(..) => {
            format!("a file for each skill: {}", path.replace(operation.skill.name(), "<skill>"))
        }
        Place::Block(_) => format!("one file for all skills: {path}"),
    }
}

/// Name of a skill's block.
pub(super) fn marker(skill: Skill) -> String {
    format!("opensandbox-{}", skill.name())
}

/// Whether a skill is there.
pub(super) fn look(root: &Path, target: Target, skill: Skill) -> (PathBuf, Status) {
    let (path, there) = match place(root, target, skill) {
        Place::Own(path, _) => {
            let there = path.is_file();
            (path, there)
        }
        Place::Block(path) => {
            let there = std::fs::read_to_string(&path).is_ok_and(|text| block(&text, skill).is_some());
            (path, there)
        }
    };
    (path, if there { Status::AlreadyPresent } else { Status::NotInstalled })
}

/// Writes a skill.
pub(super) fn install(root: &Path, target: Target, skill: Skill) -> anyhow::Result<(PathBuf, Status)> {
    let (path, old, new) = match place(root, target, skill) {
        Place::Own(path, text) => (path.clone(), read(&path)?, text),
        Place::Block(path) => {
            let old = read(&path)?;
            let new = with_block(old.as_deref().unwrap_or_default(), skill);
            let had_block = old.as_deref().is_some_and(|text| block(text, skill).is_some());
            if !had_block {
                write(&path, &new)?;
                return Ok((path, Status::Installed));
            }
            (path, old, new)
        }
    };
    let status = match old {
        Some(old) if old == new => return Ok((path, Status::AlreadyPresent)),
        Some(_) => Status::Updated,
        None => Status::Installed,
    };
    write(&path, &new)?;
    Ok((path, status))
}

/// Removes a skill and what would be empty without it.
pub(super) fn uninstall(root: &Path, target: Target, skill: Skill) -> anyhow::Result<(PathBuf, Status)> {
    let failed = |path: &Path| path.display().to_string();
    match place(root, target, skill) {
        Place::Own(path, _) => match std::fs::remove_file(&path) {
            Ok(()) => {
                if path.ends_with("SKILL.md")
                    && let Some(directory) = path.parent()
                {
                    // One that holds more than the skill stays.
                    let _ = std::fs::remove_dir(directory);
                }
                Ok((path, Status::Removed))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok((path, Status::NotInstalled)),
            Err(error) => Err(error).with_context(|| failed(&path)),
        },
        Place::Block(path) => {
            let Some(text) = read(&path)? else { return Ok((path, Status::NotInstalled)) };
            let Some((from, to)) = block(&text, skill) else { return Ok((path, Status::NotInstalled)) };
            let before = text[..from].trim_end_matches('\n');
            let after = text[to..].trim_start_matches('\n');
            let rest = match (before.is_empty(), after.is_empty()) {
                (true, _) => after.to_owned(),
                (false, true) => format!("{before}\n"),
                (false, false) => format!("{before}\n\n{after}"),
            };
            match rest.is_empty() {
                true => std::fs::remove_file(&path).with_context(|| failed(&path))?,
                false => write(&path, &rest)?,
            }
            Ok((path, Status::Removed))
        }
    }
}

/// Where a skill's block begins and ends, line end included.
fn block(text: &str, skill: Skill) -> Option<(usize, usize)> {
    let (begin, end) = marks(skill);
    let from = text.find(&begin)?;
    let to = from + text[from..].find(&end)? + end.len();
    Some((from, if text[to..].starts_with('\n') { to + 1 } else { to }))
}

fn marks(skill: Skill) -> (String, String) {
    let name = marker(skill);
    (format!("<!-- BEGIN {name} -->"), format!("<!-- END {name} -->"))
}

fn with_block(text: &str, skill: Skill) -> String {
    let (begin, end) = marks(skill);
    let new = format!("{begin}\n{}\n{end}\n", skill.body().trim_end());
    match block(text, skill) {
        Some((from, to)) => format!("{}{new}{}", &text[..from], &text[to..]),
        None if text.trim().is_empty() => new,
        None => format!("{}\n\n{new}", text.trim_end()),
    }
}

fn read(path: &Path) -> anyhow::Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let failed = || path.display().to_string();
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(failed)?;
    }
    std::fs::write(path, text).with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skills_come_and_go_and_leave_the_rest_alone() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for target in Target::each() {
            let shared = matches!(target, Target::Copilot | Target::Windsurf | Target::Cline);
            let step = |expected: Status, (path, status): (PathBuf, Status)| {
                assert_eq!(status, expected, "{target:?}");
                path
            };
            let skill = Skill::FileOperations;
            step(Status::NotInstalled, uninstall(root, target, skill).unwrap());
            let path = step(Status::Installed, install(root, target, skill).unwrap());
            step(Status::AlreadyPresent, install(root, target, skill).unwrap());
            step(Status::AlreadyPresent, look(root, target, skill));
            let text = std::fs::read_to_string(&path).unwrap();
            let changed = match shared {
                true => format!("mine\n\n{}\nmine too\n", text.replace("osb", "xyz")),
                false => "old".to_owned(),
            };
            std::fs::write(&path, changed).unwrap();
            step(Status::Updated, install(root, target, skill).unwrap());
            step(Status::Installed, install(root, target, Skill::NetworkEgress).unwrap());
            step(Status::Removed, uninstall(root, target, skill).unwrap());
            step(Status::Removed, uninstall(root, target, Skill::NetworkEgress).unwrap());
            match shared {
                true => assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine\n\nmine too\n"),
                false => assert!(!path.exists()),
            }
        }
    }
}
