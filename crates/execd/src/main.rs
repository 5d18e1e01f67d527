//! Entry of the daemon inside a sandbox.

fn main() -> std::process::ExitCode {
    osb_execd::start::main()
}
