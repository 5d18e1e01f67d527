//! The figures, one function each.

mod cli;
mod create;
mod exec;
mod growth;
mod isolated;
mod proxy;
mod server;
mod sessions;
mod streams;
mod transfer;
mod unpack;

use anyhow::Result;

pub(crate) use proxy::backend;

/// A figure that can be asked for.
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
}

/// All figures, in the order `all` runs them.
pub(crate) const ALL: &[Spec] = &[
    Spec { name: "server", about: "ready after start, resident when idle" },
    Spec {
        name: "create_exec",
        about: "cold create to the result of /bin/true (and of bash -c true); peers runc, docker",
    },
    Spec { name: "stages", about: "where the time of one create goes" },
    Spec { name: "burst", about: "100 creates at once, each with one /bin/true" },
    Spec { name: "sustained", about: "create + /bin/true + delete per second" },
    Spec { name: "idle", about: "memory per idle sandbox with 500 live" },
    Spec { name: "exec", about: "command `true` in an open sandbox; peer bare bash -c true" },
    Spec { name: "exec_16", about: "commands per second, 16 at once" },
    Spec { name: "session", about: "command `true` in an open shell session" },
    Spec { name: "isolated", about: "start of an isolated session, and `true` in an open one" },
    Spec { name: "line", about: "from a line's end to its event" },
    Spec { name: "stdout", about: "1 GiB of output streamed, in short and in long lines, and peak memory" },
    Spec { name: "pty_echo", about: "from a key to its echo on a terminal" },
    Spec { name: "delete", about: "delete call, and until everything is gone" },
    Spec { name: "transfer", about: "1 GiB up and down, and peak memory" },
    Spec { name: "small_files", about: "1,000 files of 4 KiB in one upload call" },
    Spec {
        name: "unpack",
        about: "loading a gzip image, MB/s of compressed bytes; peers skopeo + umoci, docker load",
    },
    Spec {
        name: "first_of_image",
        about: "first sandbox of an image in a registry on loopback; peer skopeo + load",
    },
    Spec { name: "cli", about: "starts of the command line, `osb run host -- true`; peer docker run" },
    Spec { name: "proxy", about: "requests to a port of a sandbox; peer direct" },
    Spec { name: "growth", about: "get, list, create, proxy with 500 live against 1" },
];

/// Measures one figure and prints its lines.
pub(crate) async fn run(spec: &Spec) -> Result<()> {
    match spec.name {
        "server" => server::ready_and_idle().await,
        "create_exec" => create::create_exec().await,
        "stages" => create::stages().await,
        "burst" => create::burst().await,
        "sustained" => create::sustained().await,
        "idle" => server::idle_sandboxes().await,
        "exec" => exec::one_by_one().await,
        "exec_16" => exec::sixteen().await,
        "session" => sessions::one_by_one().await,
        "isolated" => isolated::one_by_one().await,
        "line" => streams::line().await,
        "stdout" => streams::one_gib().await,
        "pty_echo" => streams::pty_echo().await,
        "delete" => create::delete().await,
        "transfer" => transfer::one_gib().await,
        "small_files" => transfer::small_files().await,
        "unpack" => unpack::image_load(),
        "first_of_image" => cli::first_of_image().await,
        "cli" => cli::starts().await,
        "proxy" => proxy::requests().await,
        _ => growth::one_against_many().await,
    }
}

/// A number from the environment, to shorten or lengthen a run.
pub(crate) fn count(default: usize) -> usize {
    std::env::var("BENCH_N").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}
