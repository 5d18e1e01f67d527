//! Where the sandbox daemon of this build is.

use std::path::{Path, PathBuf};

use osb_engine::ExecdSource;

include!(concat!(env!("OUT_DIR"), "/execd.rs"));

/// There is no daemon.
#[derive(Debug, thiserror::Error)]
#[error(
    "this build carries no sandbox daemon and there is none at {}: run `make build`, which makes one, or build it with `cargo build --release -p osb-execd --target x86_64-unknown-linux-musl` and put `execd` there", .0.display()
)]
pub(crate) struct Missing(PathBuf);

/// The daemon that was built in, else the file `execd` beside this program.
pub(crate) fn find() -> Result<ExecdSource, Missing> {
    match EMBEDDED {
        Some(bytes) => Ok(ExecdSource::Bytes(bytes)),
        None => beside(&std::env::current_exe().unwrap_or_default()),
    }
}

/// Takes the daemon that was built in out of this process's memory, once the engine has its copy: it was read through
/// the program's own mapping, which would keep all of it resident. Whoever reads it again gets it from the file.
pub(crate) fn forget() {
    if let Some(bytes) = EMBEDDED {
        drop_pages(bytes);
    }
}

/// For constants only.
fn drop_pages(bytes: &'static [u8]) {
    let page = rustix::param::page_size();
    let start = bytes.as_ptr().align_offset(page);
    let length = bytes.len().saturating_sub(start) / page * page;
    if length == 0 {
        return;
    }
    let pages = bytes[start..].as_ptr().cast_mut().cast();
    // SAFETY: whole pages within a constant of this program, which lies in the read-only mapping of its file: nothing
    // can have written to them, so that what is dropped is what the next access reads. Failure changes nothing.
    unsafe { libc::madvise(pages, length, libc::MADV_DONTNEED) };
}

fn beside(program: &Path) -> Result<ExecdSource, Missing> {
    let path = program.with_file_name("execd");
    if path.is_file() { Ok(ExecdSource::Path(path)) } else { Err(Missing(path)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_daemon_looks_beside_itself_and_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("osb");
        let error = beside(&program).unwrap_err().to_string();
        assert!(error.contains("make build") && error.contains(dir.path().to_str().unwrap()), "{error}");
        std::fs::write(dir.path().join("execd"), "x").unwrap();
        assert!(matches!(beside(&program), Ok(ExecdSource::Path(path)) if path == dir.path().join("execd")));
    }

    /// How many of the pages are in this process's memory.
    fn resident(bytes: &[u8]) -> usize {
        use std::os::unix::fs::FileExt as _;
        let page = rustix::param::page_size();
        let map = std::fs::File::open("/proc/self/pagemap").unwrap();
        let pages = bytes.as_ptr().addr() / page..(bytes.as_ptr().addr() + bytes.len()).div_ceil(page);
        let is_present = |index: usize| {
            let mut entry = [0_u8; 8];
            map.read_exact_at(&mut entry, index as u64 * 8).unwrap();
            u64::from_ne_bytes(entry) >> 63 == 1
        };
        pages.filter(|index| is_present(*index)).count()
    }

    #[test]
    fn the_engines_source_is_what_is_forgotten() {
        let Ok(ExecdSource::Bytes(bytes)) = find() else { return };
        let sum = || bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        let (before, all) = (sum(), resident(bytes));
        forget();
        assert!(resident(bytes) < all / 2, "{} of {all}", resident(bytes));
        assert_eq!(sum(), before);
    }

    #[test]
    fn a_constant_leaves_memory_and_stays_what_it_is() {
        const BYTES: &[u8] = include_bytes!("../../../Cargo.lock");
        let sum = || BYTES.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        let (before, all) = (sum(), resident(BYTES));
        drop_pages(BYTES);
        // Whatever else lies beside it may have brought some back.
        assert!(resident(BYTES) < all, "all {all} pages stayed");
        assert_eq!(sum(), before);
        drop_pages(&BYTES[..1]);
        drop_pages(b"");
    }

    #[test]
    fn an_embedded_daemon_is_a_program() {
        if let Some(bytes) = EMBEDDED {
            assert!(bytes.starts_with(b"\x7fELF"));
        }
    }
}
