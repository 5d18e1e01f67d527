//! Tests of the engine as root.
//!
//! One program in several roles, told apart by its arguments: the tests themselves, the engine's helpers, PID 1 of the
//! sandboxes, what runs inside them, and a server to be killed. Being static it needs nothing of an image.

// Without a harness the lints do not see that this is a test.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod escape;
mod hostile_reuse;
mod images;
mod init;
mod inside;
mod kept;
mod life;
mod limits;
mod restart;
mod reuse;
mod standby;
mod support;

use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("--boot-fd") => init::main(&args[2]),
        Some("__inside") => inside::main(&args[2..]),
        Some("__server") => restart::server(&args[2]),
        Some(role) if role.starts_with("__") => osb_engine::helper_main(role).expect("a known role"),
        _ => run(&args[1..]),
    }
}

type Test = (&'static str, fn());

fn run(args: &[String]) -> ExitCode {
    let tests: Vec<Test> = [
        life::TESTS,
        escape::TESTS,
        limits::TESTS,
        restart::TESTS,
        images::TESTS,
        standby::TESTS,
        kept::TESTS,
        hostile_reuse::TESTS,
    ]
    .concat();
    if args.iter().any(|arg| arg == "--list") {
        for (name, _) in &tests {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: {} tests of the engine need root", tests.len());
        return ExitCode::SUCCESS;
    }
    let filters: Vec<&String> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let mut failed = 0;
    for (name, test) in tests {
        if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter.as_str())) {
            continue;
        }
        let begin = Instant::now();
        let ok = std::panic::catch_unwind(test).is_ok();
        println!("test {name} ... {} ({} ms)", if ok { "ok" } else { "FAILED" }, begin.elapsed().as_millis());
        failed += u32::from(!ok);
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
