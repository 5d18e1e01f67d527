//! `osb skills`: texts from which AI coding tools learn to use this program, and where each tool looks for them.

mod install;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};

use crate::Globals;
use crate::args::{OutputArg, names};
use crate::exit;
use crate::output::{Format, Printer};
use crate::streams::{Streams, color_allowed};
use install::{Operation, Status};

/// What to do with skills.
#[derive(Debug, Clone, Subcommand)]
pub enum SkillsAction {
    /// List skills, tools, and what is installed
    List {
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show a skill
    Show {
        /// Which
        #[arg(ignore_case = true)]
        skill: Skill,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Write a skill, or all, where a tool finds it; repeating it does no harm
    Install(InstallArgs),
    /// Remove a skill from a tool
    Uninstall(UninstallArgs),
}

/// Arguments of `skills install`.
#[derive(Debug, Clone, Args)]
pub struct InstallArgs {
    /// Which
    #[arg(ignore_case = true, required_unless_present = "all_builtins")]
    skill: Option<Skill>,
    /// All skills
    #[arg(long, conflicts_with = "skill")]
    all_builtins: bool,
    /// Accepted and without effect
    #[arg(short, long)]
    force: bool,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Arguments of `skills uninstall`.
#[derive(Debug, Clone, Args)]
pub struct UninstallArgs {
    /// Which
    #[arg(ignore_case = true, default_value = "sandbox-troubleshooting")]
    skill: Skill,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Where skills go.
#[derive(Debug, Clone, Args)]
pub(crate) struct PlaceArgs {
    /// Tool, or all
    #[arg(short, long, value_enum, ignore_case = true)]
    target: Target,
    /// This directory, or everywhere
    #[arg(long, value_enum, ignore_case = true)]
    scope: Scope,
    #[command(flatten)]
    output: OutputArg,
}

/// The skills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Skill {
    /// Find out why a sandbox does not work
    SandboxTroubleshooting,
    /// Make, renew and end sandboxes
    SandboxLifecycle,
    /// Run commands
    CommandExecution,
    /// Move and change files
    FileOperations,
    /// Control connections
    NetworkEgress,
    /// Keep secrets out of sandboxes
    CredentialVault,
}

/// The tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// Claude Code
    Claude,
    /// Cursor
    Cursor,
    /// Codex
    Codex,
    /// GitHub Copilot
    Copilot,
    /// Windsurf
    Windsurf,
    /// Cline
    Cline,
    /// OpenCode
    Opencode,
    /// All of them
    All,
}

/// How far a skill reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scope {
    /// This directory
    Project,
    /// The home directory: all projects
    Global,
}

impl Skill {
    fn name(self) -> &'static str {
        match self {
            Self::SandboxTroubleshooting => "sandbox-troubleshooting",
            Self::SandboxLifecycle => "sandbox-lifecycle",
            Self::CommandExecution => "command-execution",
            Self::FileOperations => "file-operations",
            Self::NetworkEgress => "network-egress",
            Self::CredentialVault => "credential-vault",
        }
    }

    /// What it is about, in a word.
    fn area(self) -> &'static str {
        match self {
            Self::SandboxTroubleshooting => "Troubleshooting",
            Self::SandboxLifecycle => "Lifecycle",
            Self::CommandExecution => "Execution",
            Self::FileOperations => "Files",
            Self::NetworkEgress => "Network",
            Self::CredentialVault => "General",
        }
    }

    /// The whole text, with its front matter.
    fn text(self) -> &'static str {
        match self {
            Self::SandboxTroubleshooting => include_str!("skills/sandbox-troubleshooting.md"),
            Self::SandboxLifecycle => include_str!("skills/sandbox-lifecycle.md"),
            Self::CommandExecution => include_str!("skills/command-execution.md"),
            Self::FileOperations => include_str!("skills/file-operations.md"),
            Self::NetworkEgress => include_str!("skills/network-egress.md"),
            Self::CredentialVault => include_str!("skills/credential-vault.md"),
        }
    }

    /// The text behind its front matter.
    fn body(self) -> &'static str {
        self.split().1
    }

    fn split(self) -> (&'static str, &'static str) {
        let text = self.text();
        text.strip_prefix("---\n")
            .and_then(|rest| rest.split_once("\n---\n"))
            .map_or(("", text), |(front, body)| (front, body.trim_start_matches('\n')))
    }

    /// When to use it, from the front matter.
    fn description(self) -> &'static str {
        let front = self.split().0.lines().find_map(|line| line.strip_prefix("description: "));
        front.unwrap_or_default()
    }

    fn title(self) -> &'static str {
        self.body().lines().find_map(|line| line.strip_prefix("# ")).unwrap_or_default()
    }
}

impl Target {
    fn each() -> impl Iterator<Item = Self> {
        Self::value_variants().iter().copied().filter(|target| *target != Self::All)
    }

    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    fn label(self) -> &'static str {
        match self {
            Self::Claude => "Claude Code",
            Self::Cursor => "Cursor",
            Self::Codex => "Codex",
            Self::Copilot => "GitHub Copilot",
            Self::Windsurf => "Windsurf",
            Self::Cline => "Cline",
            Self::Opencode => "OpenCode",
            Self::All => "all",
        }
    }
}

impl Scope {
    fn name(self) -> &'static str {
        match self {
            Self::Project => "project",
            Self::Global => "global",
        }
    }
}

pub(crate) async fn run(
    globals: &Globals,
    action: SkillsAction,
    var: &impl Fn(&str) -> Option<String>,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    let color = streams.stdout_is_terminal && color_allowed(globals.no_color, var);
    let printer = |format| Printer { format, color };
    let home = || {
        let home = var("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        home.ok_or_else(|| anyhow::anyhow!("HOME is not set; use --scope project"))
    };
    let root = |scope| match scope {
        Scope::Project => Ok(PathBuf::new()),
        Scope::Global => home(),
    };
    match action {
        SkillsAction::List { output } => {
            let home = home().unwrap_or_default();
            list(&home, output.output, printer(output.output), streams).await?;
        }
        SkillsAction::Show { skill, output } => match output.output {
            Format::Table => streams.out(skill.body().as_bytes()).await?,
            format => {
                let json = json!({
                    "skill": skill.name(), "title": skill.title(), "area": skill.area(),
                    "summary": skill.description(), "trigger_hint": skill.description(),
                    "content": skill.text(),
                });
                printer(format).data(streams, &json).await?;
            }
        },
        SkillsAction::Install(args) => {
            let skills = match args.skill {
                Some(skill) => vec![skill],
                None => Skill::value_variants().to_vec(),
            };
            let root = root(args.place.scope)?;
            let operations =
                each(&args.place, &skills, |target, skill| install::install(&root, target, skill))?;
            done(&operations, printer(args.place.output.output), streams).await?;
        }
        SkillsAction::Uninstall(args) => {
            let root = root(args.place.scope)?;
            let operations =
                each(&args.place, &[args.skill], |target, skill| install::uninstall(&root, target, skill))?;
            done(&operations, printer(args.place.output.output), streams).await?;
        }
    }
    Ok(exit::SUCCESS)
}

fn each(
    place: &PlaceArgs,
    skills: &[Skill],
    mut step: impl FnMut(Target, Skill) -> anyhow::Result<(PathBuf, Status)>,
) -> anyhow::Result<Vec<Operation>> {
    let mut operations = Vec::new();
    for target in Target::each().filter(|target| [*target, Target::All].contains(&place.target)) {
        for &skill in skills {
            let (path, status) = step(target, skill)?;
            operations.push(Operation { skill, target, scope: place.scope, path, status });
        }
    }
    Ok(operations)
}

async fn done(operations: &[Operation], printer: Printer, streams: &mut Streams) -> anyhow::Result<()> {
    let changed = operations.iter().any(|operation| operation.status.is_change());
    let rows = operations.iter().map(Operation::row).collect();
    let json = json!({
        "operations": operations.iter().map(Operation::to_json).collect::<Vec<_>>(),
        "requires_restart": changed,
    });
    printer.list(streams, &["skill", "tool", "scope", "status", "path"], rows, &json).await?;
    if changed && printer.format == Format::Table {
        streams.note("restart the tool to let it see the change").await;
    }
    Ok(())
}

/// What is installed for one tool in one scope.
fn target_json(places: &[Operation]) -> Value {
    let skills: Vec<Value> = places
        .iter()
        .map(|place| {
            let status = if place.status == Status::NotInstalled { "not installed" } else { "installed" };
            json!({"skill": place.skill.name(), "status": status, "path": place.path.display().to_string()})
        })
        .collect();
    let first = places.first();
    json!({
        "target": first.map(|place| place.target.name()),
        "label": first.map(|place| place.target.label()),
        "scope": first.map(|place| place.scope.name()),
        "layout": first.map(install::layout),
        "skills": skills,
    })
}

async fn list(
    home: &std::path::Path,
    format: Format,
    printer: Printer,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    let mut places = Vec::new();
    for target in Target::each() {
        for (scope, root) in [(Scope::Project, std::path::Path::new("")), (Scope::Global, home)] {
            for &skill in Skill::value_variants() {
                let (path, status) = install::look(root, target, skill);
                places.push(Operation { skill, target, scope, path, status });
            }
        }
    }
    let skills: Vec<Value> = Skill::value_variants()
        .iter()
        .map(|skill| {
            json!({
                "slug": skill.name(), "title": skill.title(), "area": skill.area(),
                "summary": skill.description(), "trigger_hint": skill.description(), "marker_id": install::marker(*skill),
            })
        })
        .collect();
    let json = json!({
        "skills": skills,
        "targets": places.chunks(Skill::value_variants().len()).map(target_json).collect::<Vec<_>>(),
    });
    if format != Format::Table {
        return printer.data(streams, &json).await;
    }
    let rows = Skill::value_variants()
        .iter()
        .map(|skill| {
            let installed: Vec<String> = places
                .iter()
                .filter(|place| place.skill == *skill && place.status != Status::NotInstalled)
                .map(|place| format!("{} ({})", place.target.name(), place.scope.name()))
                .collect();
            vec![skill.name().into(), installed.join(", ").into(), skill.description().into()]
        })
        .collect();
    printer.list(streams, &["skill", "installed for", "use it"], rows, &json).await?;
    streams
        .note(&format!(
            "tools: {}; install with `osb skills install SKILL -t TOOL --scope project`",
            names::<Target>()
        ))
        .await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_skill_has_front_matter_title_and_text() {
        for skill in Skill::value_variants() {
            let text = skill.text();
            assert!(text.starts_with(&format!("---\nname: {}\ndescription: ", skill.name())), "{skill:?}");
            assert!(skill.description().len() > 40, "{skill:?}");
            assert!(skill.title().starts_with("OpenSandbox"), "{skill:?}");
            assert!(!skill.body().contains("\n---\n") && skill.body().lines().count() > 15, "{skill:?}");
            assert_eq!(skill.to_possible_value().unwrap().get_name(), skill.name());
        }
    }

    /// What the skills tell a tool to type is what this program takes.
    #[test]
    fn commands_in_skills_exist() {
        let osb = <crate::Action as clap::Subcommand>::augment_subcommands(clap::Command::new("osb"));
        for skill in Skill::value_variants() {
            for line in skill.text().lines().filter(|line| line.starts_with("osb ")) {
                let mut command = &osb;
                for word in line
                    .split(' ')
                    .skip(1)
                    .take_while(|word| word.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
                {
                    match command.find_subcommand(word) {
                        Some(below) => command = below,
                        None => break,
                    }
                }
                assert!(!command.has_subcommands(), "{line}");
            }
        }
    }
}
