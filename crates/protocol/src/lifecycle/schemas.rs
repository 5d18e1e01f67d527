//! Schemas of members that are one of a few words. Written out, since a derived reference or an inlined type does
//! not come out as a plain list of words.

use utoipa::openapi::schema::{Object, ObjectBuilder, Type};

pub(super) fn os() -> Object {
    words(&["linux", "windows"], None)
}

pub(super) fn arch() -> Object {
    words(&["amd64", "arm64"], None)
}

pub(super) fn policy_action() -> Object {
    words(&["allow", "deny"], None)
}

pub(super) fn ossfs_version() -> Object {
    words(&["1.0", "2.0"], Some("2.0"))
}

pub(super) fn template_format() -> Object {
    words(&["native", "overlaybd"], None)
}

pub(super) fn template_format_or_default() -> Object {
    words(&["native", "overlaybd"], Some("overlaybd"))
}

pub(super) fn template_phase() -> Object {
    words(&["Pending", "Building", "Succeeded", "Failed"], None)
}

pub(super) fn diagnostic_kind() -> Object {
    words(&["logs", "events"], None)
}

pub(super) fn diagnostic_delivery() -> Object {
    words(&["inline", "url"], None)
}

pub(super) fn pool() -> Object {
    words(&["pool"], Some("pool"))
}

pub(super) fn allocated() -> Object {
    words(&["allocated"], Some("allocated"))
}

pub(super) fn healthy() -> Object {
    words(&["healthy"], None)
}

pub(super) fn sandbox_create() -> Object {
    words(&["sandbox.create"], None)
}

fn words(words: &[&str], default: Option<&str>) -> Object {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .enum_values(Some(words.iter().copied()))
        .default(default.map(Into::into))
        .build()
}
