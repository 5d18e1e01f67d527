//! Embeds the sandbox daemon, so that copying one file to a bare host gives a working server.
//!
//! `OSB_EXECD` names the daemon's binary; without it, `dist/execd` of the workspace is taken when it is there. A
//! build that has neither looks for the daemon beside itself at run time.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-env-changed=OSB_EXECD");
    let named = env::var_os("OSB_EXECD").filter(|path| !path.is_empty()).map(PathBuf::from);
    let manifest = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default();
    let usual = manifest.join("../../dist/execd");
    let path = match named {
        Some(path) => match fs::canonicalize(&path) {
            Ok(path) => Some(path),
            Err(error) => {
                println!("cargo::error=OSB_EXECD names {}: {error}", path.display());
                return;
            }
        },
        None => fs::canonicalize(usual).ok(),
    };
    let value = match &path {
        Some(path) => {
            println!("cargo::rerun-if-changed={}", path.display());
            format!("Some(include_bytes!({:?}))", path.display().to_string())
        }
        None => {
            // Named so that cargo does not fall back to "any file of this package".
            println!("cargo::rerun-if-changed=build.rs");
            "None".to_owned()
        }
    };
    let out = env::var_os("OUT_DIR").map(PathBuf::from).unwrap_or_default().join("execd.rs");
    // No constant: each use may be given a copy of its own.
    if let Err(error) = fs::write(&out, format!("static EMBEDDED: Option<&[u8]> = {value};\n")) {
        println!("cargo::error=cannot write {}: {error}", out.display());
    }
}
