//! Entry of the daemon inside a sandbox.

/// musl's own allocator gives memory back to the kernel as soon as it can and meets a page fault at each way back;
/// bigger allocators cost more to start than the daemon does.
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

fn main() -> std::process::ExitCode {
    osb_execd::start::main()
}
