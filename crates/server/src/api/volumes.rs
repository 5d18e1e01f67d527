//! Checks of volumes. The embedded runtime mounts none yet, but a request learns first what is wrong with it.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use osb_protocol::lifecycle::Volume;

use crate::config::is_below;
use crate::error::ApiError;

/// 422: members that break their pattern.
pub(crate) fn malformed(volume: &Volume) -> Vec<(&'static str, &'static str)> {
    let mut found = Vec::new();
    if !is_dns_label(&volume.name, 63) {
        found.push(("name", "lower-case letters, digits and '-' are expected, at most 63"));
    }
    if !volume.mount_path.starts_with('/') {
        found.push(("mountPath", "an absolute path is expected"));
    }
    let sources =
        [volume.host.is_some(), volume.pvc.is_some(), volume.ossfs.is_some()].iter().filter(|s| **s).count();
    if sources != 1 {
        found.push(("name", "exactly one of host, pvc and ossfs is required"));
    }
    if volume.host.as_ref().is_some_and(|host| !is_absolute(&host.path)) {
        found.push(("host", "path must be absolute"));
    }
    if let Some(pvc) = &volume.pvc {
        if !is_dns_label(&pvc.claim_name, 253) {
            found.push(("pvc", "claimName: lower-case letters, digits and '-' are expected, at most 253"));
        }
        if pvc.storage.as_deref().is_some_and(|size| !is_size(size)) {
            found.push(("pvc", "storage: a size such as 10Gi is expected"));
        }
    }
    if let Some(ossfs) = &volume.ossfs {
        if !(3..=63).contains(&ossfs.bucket.chars().count()) {
            found.push(("ossfs", "bucket: 3 to 63 characters are expected"));
        }
        if ossfs.endpoint.is_empty() || ossfs.access_key_id.is_empty() || ossfs.access_key_secret.is_empty() {
            found.push(("ossfs", "endpoint, accessKeyId and accessKeySecret must not be empty"));
        }
    }
    found
}

/// 400: everything else.
pub(crate) fn check(volumes: &[Volume], allowed: &[String]) -> Result<(), ApiError> {
    let mut names = BTreeSet::new();
    for volume in volumes {
        if !names.insert(&volume.name) {
            return refuse("VOLUME::DUPLICATE_NAME", "two volumes have the same name");
        }
        if volume.sub_path.as_deref().is_some_and(|path| {
            Path::new(path).components().any(|c| matches!(c, Component::RootDir | Component::ParentDir))
        }) {
            return refuse("VOLUME::INVALID_SUB_PATH", "subPath must be relative and hold no '..'");
        }
        if let Some(host) = &volume.host {
            check_host(&host.path, allowed)?;
        }
        if volume.ossfs.as_ref().and_then(|o| o.options.as_ref()).is_some_and(|options| {
            options.iter().any(|option| option.trim().is_empty() || option.starts_with('-'))
        }) {
            return refuse("VOLUME::INVALID_OSSFS_OPTION", "options must not be blank or begin with '-'");
        }
    }
    if volumes.is_empty() {
        Ok(())
    } else {
        Err(ApiError::InvalidParameter(
            "volumes are not supported by this runtime yet: create without them and copy files in".to_owned(),
        ))
    }
}

fn check_host(path: &str, allowed: &[String]) -> Result<(), ApiError> {
    if path.contains("/..") || path.contains("//") || (path.len() > 1 && path.ends_with('/')) {
        return refuse(
            "VOLUME::INVALID_HOST_PATH",
            "host.path must be plain: no '..', no '//' and no '/' at its end",
        );
    }
    let plain = path.replace('\\', "/");
    if !is_below(Path::new(&plain), allowed) {
        return refuse(
            "VOLUME::HOST_PATH_NOT_ALLOWED",
            "host.path must lie in one of the server's storage.allowed_host_paths; an empty list allows none",
        );
    }
    Ok(())
}

fn refuse<T>(code: &'static str, message: &str) -> Result<T, ApiError> {
    Err(ApiError::Volume(code, message.to_owned()))
}

fn is_dns_label(text: &str, max: usize) -> bool {
    let bytes = text.as_bytes();
    (1..=max).contains(&bytes.len())
        && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
        && bytes[0] != b'-'
        && bytes[bytes.len() - 1] != b'-'
}

fn is_absolute(path: &str) -> bool {
    let bytes = path.as_bytes();
    path.starts_with('/')
        || bytes.len() >= 3
            && bytes[0].is_ascii_alphabetic()
            && bytes[1] == b':'
            && matches!(bytes[2], b'\\' | b'/')
}

fn is_size(text: &str) -> bool {
    let number = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].iter().find_map(|unit| text.strip_suffix(unit));
    let number = number.unwrap_or(text);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    digits(whole) && digits(fraction)
}
