//! Request files of `sandbox create`: JSON in the names of the API, without a member that nobody would look at.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, bail};
use osb_client::protocol::lifecycle::CreateSandboxRequest;
use osb_client::{DEFAULT_ENTRYPOINT, DEFAULT_TIMEOUT};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Members that shape a workload, which a template has decided.
const NOT_WITH_TEMPLATE: [&str; 9] = [
    "entrypoint",
    "env",
    "resourceLimits",
    "resourceRequests",
    "volumes",
    "platform",
    "credentialProxy",
    "lifecycle",
    "secureAccess",
];

/// The limits that every client of this protocol sends when none are named.
pub(super) fn default_limits() -> BTreeMap<String, String> {
    BTreeMap::from([("cpu", "1"), ("memory", "2Gi")].map(|(k, v)| (k.to_owned(), v.to_owned())))
}

/// What a sandbox is made from.
pub(super) fn source(request: &CreateSandboxRequest) -> Option<(&'static str, String)> {
    let image = request.image.as_ref().map(|image| ("image", image.uri.clone()));
    let template = request.template_id.clone().map(|id| ("template", id));
    let snapshot = request.snapshot_id.clone().map(|id| ("snapshot_id", id));
    image.or(template).or(snapshot)
}

/// A request file; also whether it sets the lifetime.
pub(super) fn read(path: &Path) -> anyhow::Result<(CreateSandboxRequest, bool)> {
    parse(&text(path)?).with_context(|| path.display().to_string())
}

/// A file with a part of a request.
pub(crate) fn read_part<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let value: Value = serde_json::from_str(&text(path)?)
        .map_err(|error| anyhow::anyhow!("{}: no JSON: {error}", path.display()))?;
    strict(value).with_context(|| path.display().to_string())
}

fn text(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn parse(text: &str) -> anyhow::Result<(CreateSandboxRequest, bool)> {
    let mut value: Value = serde_json::from_str(text).map_err(|error| anyhow::anyhow!("no JSON: {error}"))?;
    let Some(members) = value.as_object_mut() else { bail!("an object is expected") };
    let sources = ["image", "templateId", "snapshotId"];
    if sources.iter().filter(|name| members.get(**name).is_some_and(|value| !value.is_null())).count() != 1 {
        bail!("exactly one of image, templateId and snapshotId is needed");
    }
    // Two members have a short form.
    if let Some(Value::String(uri)) = members.get("image") {
        let image = json!({"uri": uri});
        members.insert("image".to_owned(), image);
    }
    if let Some(Value::Bool(enabled)) = members.get("credentialProxy") {
        let proxy = json!({"enabled": enabled});
        members.insert("credentialProxy".to_owned(), proxy);
    }
    let has_timeout = members.contains_key("timeout");
    if members.contains_key("templateId") {
        if let Some(name) = NOT_WITH_TEMPLATE.iter().find(|name| members.contains_key(**name)) {
            bail!("{name} does not go with templateId: the template has decided that");
        }
        if members.get("timeout").is_none_or(Value::is_null) {
            bail!("a sandbox from a template needs a timeout");
        }
    } else {
        if members.contains_key("image") {
            members.entry("entrypoint").or_insert_with(|| json!(DEFAULT_ENTRYPOINT));
        }
        members.entry("resourceLimits").or_insert_with(|| json!(default_limits()));
        members.entry("timeout").or_insert_with(|| json!(DEFAULT_TIMEOUT.as_secs()));
    }
    Ok((strict(value)?, has_timeout))
}

/// Reads a value; members that nothing would look at are an error.
fn strict<T: DeserializeOwned>(value: Value) -> anyhow::Result<T> {
    let mut unknown = Vec::new();
    let read = serde_ignored::deserialize(value, |path| unknown.push(path.to_string()))?;
    if !unknown.is_empty() {
        bail!("unknown: {}", unknown.join(", "));
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        format!("{:#}", parse(text).unwrap_err())
    }

    #[test]
    fn short_forms_and_defaults() {
        let (request, has_timeout) = parse(r#"{"image": "host", "credentialProxy": true}"#).unwrap();
        assert!(!has_timeout);
        assert_eq!(
            serde_json::to_value(&request).unwrap(),
            json!({
                "image": {"uri": "host"}, "credentialProxy": {"enabled": true}, "timeout": 600,
                "entrypoint": ["tail", "-f", "/dev/null"], "resourceLimits": {"cpu": "1", "memory": "2Gi"},
                "secureAccess": false,
            })
        );
        let (request, has_timeout) = parse(
            r#"{"image": {"uri": "a", "auth": {"username": "u", "password": "p"}}, "timeout": null,
                "entrypoint": ["x"], "resourceLimits": {}}"#,
        )
        .unwrap();
        assert!(has_timeout && request.timeout.is_none());
        assert_eq!(request.entrypoint.unwrap(), ["x"]);
        assert!(request.resource_limits.unwrap().is_empty() && request.image.unwrap().auth.is_some());
    }

    #[test]
    fn mistakes_are_named() {
        for (text, words) in [
            ("[]", "an object"),
            ("{", "no JSON"),
            ("{}", "exactly one of"),
            (r#"{"image": "a", "snapshotId": "b"}"#, "exactly one of"),
            (r#"{"image": "a", "imgae": "b"}"#, "unknown: imgae"),
            (r#"{"image": {"uri": "a", "tag": "b"}}"#, "unknown: image.?.tag"),
            (r#"{"templateId": "t", "env": {}, "timeout": 60}"#, "env does not go"),
            (r#"{"templateId": "t"}"#, "needs a timeout"),
            (r#"{"image": "a", "timeout": "soon"}"#, "whole number"),
        ] {
            let error = error(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
