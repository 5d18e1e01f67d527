//! Has programs trust the authority of the transparent proxy beside the sandbox: system store, browsers, Java, and the
//! variables that others read. Every step is done where its tools are, and a warning tells what was not.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{set, stopping, warn};
use crate::command::prepare::{DEFAULT_PATH, candidates};
use crate::process::inherited::next_signal;

/// Where the proxy leaves its certificate.
const CERTIFICATE: &str = "/opt/opensandbox/mitmproxy-ca-cert.pem";
/// All authorities together, for variables that replace the usual ones.
const MERGED: &str = "/opt/opensandbox/merged-ca-certificates.pem";
/// Name of the certificate in stores.
const ALIAS: &str = "opensandbox-mitmproxy";
/// How long the proxy may take.
const PATIENCE: Duration = Duration::from_secs(300);
/// Bundles of systems, best first.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
];
/// Directories that hold JDKs, and the directory of those that stand by themselves.
const JAVAS: [&str; 3] = ["/usr/lib/jvm", "/usr/java", "/opt/java"];
const ALONE: &str = "/opt";

/// What became of it.
pub(super) enum Waited {
    /// These variables are to be set.
    Done(Vec<(OsString, OsString)>),
    /// The container is to end.
    Stopped,
}

/// Waits for the certificate and puts it everywhere.
pub(super) fn trust() -> io::Result<Waited> {
    let certificate = Path::new(CERTIFICATE);
    if !wait_for(certificate)? {
        return Ok(Waited::Stopped);
    }
    if !is_filled(certificate) {
        warn(format_args!("{CERTIFICATE} did not come; the proxy's certificates are not trusted"));
        return Ok(Waited::Done(Vec::new()));
    }
    system(certificate);
    let bundle = merge(certificate);
    browsers(certificate);
    for home in javas() {
        java(&home, certificate);
    }
    let variable = |name: &str, path: &Path| (OsString::from(name), OsString::from(path));
    Ok(Waited::Done(vec![
        variable("NODE_EXTRA_CA_CERTS", certificate),
        variable("REQUESTS_CA_BUNDLE", &bundle),
        variable("SSL_CERT_FILE", &bundle),
    ]))
}

fn is_filled(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|found| found.is_file() && found.len() > 0)
}

/// `false` when the container is to end.
fn wait_for(certificate: &Path) -> io::Result<bool> {
    let signals = stopping()?;
    let until = Instant::now() + PATIENCE;
    let second = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
    while !is_filled(certificate) && Instant::now() < until {
        let _ = poll(&mut [PollFd::new(&signals, PollFlags::IN)], Some(&second));
        while let Some(signal) = next_signal(&signals) {
            if signal != libc::SIGCHLD {
                return Ok(false);
            }
        }
    }
    // As they were, for what is started from here.
    crate::process::inherited::unblock_signals();
    Ok(true)
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH");
    let path = path.as_deref().unwrap_or_else(|| OsStr::new(DEFAULT_PATH));
    candidates(program, path).into_iter().find(|candidate| {
        let access = rustix::fs::Access::EXEC_OK;
        rustix::fs::accessat(rustix::fs::CWD, candidate, access, rustix::fs::AtFlags::EACCESS).is_ok()
    })
}

/// A program that may change the system, through `sudo` where we are nobody special.
fn privileged(program: &Path) -> Command {
    match find("sudo").filter(|_| !rustix::process::geteuid().is_root()) {
        Some(sudo) => {
            let mut command = Command::new(sudo);
            command.arg("-n").arg(program);
            command
        }
        None => Command::new(program),
    }
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

fn system(certificate: &Path) {
    let (tool, dir, name) = if let Some(tool) = find("update-ca-certificates") {
        (tool, "/usr/local/share/ca-certificates", "opensandbox-mitmproxy-ca.crt")
    } else if let Some(tool) = find("update-ca-trust") {
        (tool, "/etc/pki/ca-trust/source/anchors", "opensandbox-mitmproxy-ca.pem")
    } else {
        return warn(format_args!(
            "the system store cannot be changed: no update-ca-certificates, no update-ca-trust"
        ));
    };
    let target = Path::new(dir).join(name);
    let copied = std::fs::create_dir_all(dir).and_then(|()| std::fs::copy(certificate, &target)).is_ok()
        || (succeeds(privileged(Path::new("mkdir")).arg("-p").arg(dir))
            && succeeds(privileged(Path::new("cp")).arg(certificate).arg(&target)));
    let updated = copied && {
        let extract = tool.ends_with("update-ca-trust");
        (extract && succeeds(privileged(&tool).arg("extract"))) || succeeds(&mut privileged(&tool))
    };
    if !updated {
        warn(format_args!("{} failed; the system store may not know the proxy's authority", tool.display()));
    }
}

/// Writes the bundle and gives its path, or that of the certificate alone.
fn merge(certificate: &Path) -> PathBuf {
    let python = find("python3").or_else(|| find("python")).and_then(|python| {
        let asked = Command::new(python)
            .args(["-c", "import certifi; print(certifi.where())"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output();
        let told = String::from_utf8(asked.ok().filter(|asked| asked.status.success())?.stdout).ok()?;
        Some(PathBuf::from(told.trim_end()))
    });
    let bundle = python.into_iter().chain(BUNDLES.map(PathBuf::from)).find(|bundle| is_filled(bundle));
    let Some(bundle) = bundle else {
        warn(format_args!("no bundle of authorities was found; variables name the proxy's alone"));
        return certificate.to_path_buf();
    };
    let write = || {
        let mut text = std::fs::read(&bundle)?;
        if !text.ends_with(b"\n") {
            text.push(b'\n');
        }
        text.extend(std::fs::read(certificate)?);
        let mut file = std::fs::File::create(MERGED)?;
        file.write_all(&text)
    };
    match write() {
        Ok(()) => MERGED.into(),
        Err(error) => {
            warn(format_args!("{MERGED}: {error}; variables name the proxy's authority alone"));
            certificate.to_path_buf()
        }
    }
}

/// The database of browsers below the home directory.
fn browsers(certificate: &Path) {
    let Some(home) = set("HOME").map(PathBuf::from).filter(|home| home.is_dir()) else { return };
    let Some(tool) = find("certutil") else { return };
    let dir = home.join(".pki/nssdb");
    if std::fs::create_dir_all(&dir).is_err() {
        return;
    }
    let old = !dir.join("cert9.db").exists() && dir.join("cert8.db").exists();
    let mut name = OsString::from(if old { "dbm:" } else { "sql:" });
    name.push(&dir);
    let certutil = |action: &str| {
        let mut command = Command::new(&tool);
        command.arg(action).arg("-d").arg(&name);
        command
    };
    if !old && !dir.join("cert9.db").exists() {
        let _ = succeeds(certutil("-N").arg("--empty-password"));
    }
    let _ = succeeds(certutil("-D").args(["-n", ALIAS]));
    if !succeeds(certutil("-A").args(["-n", ALIAS, "-t", "C,,", "-i"]).arg(certificate)) {
        warn(format_args!("{}: certutil failed; browsers may not trust the proxy", dir.display()));
    }
}

/// Every JDK of the image, once.
fn javas() -> Vec<PathBuf> {
    let entries = |dir: &str| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let mut found: Vec<PathBuf> = set("JAVA_HOME").map(PathBuf::from).into_iter().collect();
    found.extend(JAVAS.iter().flat_map(|dir| entries(dir)));
    found.extend(
        entries(ALONE)
            .into_iter()
            .filter(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"jdk"))),
    );
    found.extend(find("java").and_then(|java| {
        let java = std::fs::canonicalize(java).ok()?;
        Some(java.parent()?.parent()?.to_path_buf())
    }));
    let mut homes: Vec<PathBuf> =
        found.into_iter().filter_map(|home| std::fs::canonicalize(home).ok()).collect();
    homes.sort();
    homes.dedup();
    homes
}

fn java(home: &Path, certificate: &Path) {
    let tool = home.join("bin/keytool");
    let store = ["lib/security/cacerts", "jre/lib/security/cacerts"].map(|store| home.join(store));
    let Some(store) = store.into_iter().find(|store| store.is_file()).filter(|_| tool.is_file()) else {
        return;
    };
    let keytool = |action: &str| {
        let mut command = privileged(&tool);
        command.arg(action).args(["-alias", ALIAS, "-keystore"]).arg(&store).args(["-storepass", "changeit"]);
        command
    };
    if succeeds(&mut keytool("-list")) {
        let _ = succeeds(&mut keytool("-delete"));
    }
    if !succeeds(keytool("-importcert").args(["-noprompt", "-trustcacerts", "-file"]).arg(certificate)) {
        warn(format_args!("{}: keytool failed; Java may not trust the proxy", store.display()));
    }
}
