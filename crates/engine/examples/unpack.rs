//! Measures loading an image archive: `unpack DATA-DIR ARCHIVE [NAME]`, as root. For profiles; the published figure is
//! `bench/run unpack`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use osb_engine::image::{ImageStore, Options};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let (Some(data_dir), Some(archive)) = (args.get(1), args.get(2)) else {
        say("usage: unpack DATA-DIR ARCHIVE [NAME]");
        return ExitCode::FAILURE;
    };
    let measured = ImageStore::open_with(data_dir, Options { host_root: None, ..Options::default() })
        .and_then(|store| {
            let began = Instant::now();
            store.load(Path::new(archive), args.get(3).map(String::as_str), &|_| ())?;
            Ok(began.elapsed())
        });
    match measured {
        Ok(took) => {
            say(&format!("{took:?}"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            say(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn say(text: &str) {
    use std::io::Write as _;
    // Nobody reads what a closed output lost.
    let _ = writeln!(std::io::stdout(), "{text}");
}
