//! The served OpenAPI document against the reference's.
//!
//! Both are reduced to lines: operations with their parameters, bodies and statuses; schemas with their members,
//! types and limits. `fixtures/openapi.txt` holds the reference's lines, `fixtures/openapi-missing.txt` those of
//! them that are not served. A missing line that is not listed fails, and so does a listed one that is served.
//! `OSB_REFERENCE_OPENAPI=<file> cargo test -p osb-server --test openapi` writes the first anew.

// The lints know test functions, not the helpers beside them.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use serde_json::Value;

const REFERENCE: &str = include_str!("fixtures/openapi.txt");
const MISSING: &str = include_str!("fixtures/openapi-missing.txt");

struct Reader<'a>(&'a Value);

impl Reader<'_> {
    fn resolve(&self, value: &Value) -> Value {
        match value["$ref"].as_str() {
            Some(name) => self.resolve(&self.0.pointer(&name[1..]).cloned().unwrap_or_default()),
            None => value.clone(),
        }
    }

    /// A schema in one word or few: its name if it has members, else its type and limits.
    fn kind(&self, schema: &Value) -> String {
        if let Some(name) = schema["$ref"].as_str() {
            let target = self.resolve(schema);
            if target.get("properties").is_some() {
                return name.rsplit('/').next().unwrap().to_owned();
            }
            return self.kind(&target);
        }
        for word in ["anyOf", "oneOf"] {
            if let Some(choices) = schema[word].as_array() {
                let mut kinds: BTreeSet<String> = choices.iter().map(|choice| self.kind(choice)).collect();
                // Whether a request may send null is a matter of the server's leniency, tested elsewhere.
                kinds.remove("");
                return kinds.into_iter().collect::<Vec<_>>().join("|");
            }
        }
        if let Some(value) = schema.get("const") {
            return format!("one of {value}");
        }
        if let Some(values) = schema["enum"].as_array() {
            let words: BTreeSet<String> =
                values.iter().filter(|v| !v.is_null()).map(ToString::to_string).collect();
            return format!("one of {}", words.into_iter().collect::<Vec<_>>().join(" "));
        }
        let types: BTreeSet<String> = match &schema["type"] {
            Value::String(word) => [word.clone()].into(),
            Value::Array(words) => words.iter().map(|w| w.as_str().unwrap().to_owned()).collect(),
            _ => ["any".to_owned()].into(),
        };
        let mut text = types.into_iter().filter(|t| t != "null").collect::<Vec<_>>().join("|");
        if let Some(items) = schema.get("items") {
            text += &format!(" of {}", self.kind(items));
        }
        match &schema["additionalProperties"] {
            inner @ Value::Object(_) if inner.as_object().is_some_and(|o| !o.is_empty()) => {
                text += &format!(" to {}", self.kind(inner));
            }
            _ => {}
        }
        let format = schema["format"].as_str().filter(|f| !f.starts_with("int") && !f.starts_with("uint"));
        if let Some(format) = format {
            text += &format!(" {format}");
        }
        for limit in ["minimum", "maximum", "minLength", "maxLength", "minItems", "pattern"] {
            let Some(value) = schema.get(limit) else { continue };
            // Beyond what the numbers of JSON tell apart there is no bound to speak of.
            if value.as_f64().is_none_or(|n| n < 1e18) {
                text += &format!(" {limit}={value}");
            }
        }
        text
    }

    fn operations(&self, lines: &mut BTreeSet<String>) {
        for (path, item) in self.0["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                if !["get", "post", "put", "patch", "delete"].contains(&method.as_str()) {
                    continue;
                }
                let name = format!("{} {path}", method.to_uppercase());
                lines.insert(format!("{name} is {}", operation["operationId"].as_str().unwrap_or("?")));
                let shared = item["parameters"].as_array().into_iter().flatten();
                for parameter in shared.chain(operation["parameters"].as_array().into_iter().flatten()) {
                    let parameter = self.resolve(parameter);
                    lines.insert(format!(
                        "{name} takes {} {}: {}{}",
                        parameter["in"].as_str().unwrap(),
                        parameter["name"].as_str().unwrap(),
                        self.kind(&parameter["schema"]),
                        if parameter["required"] == true { ", required" } else { "" },
                    ));
                }
                if let Some(body) = operation.get("requestBody") {
                    for (kind, content) in body["content"].as_object().unwrap() {
                        let required = if body["required"] == true { ", required" } else { "" };
                        lines.insert(format!(
                            "{name} reads {kind}: {}{required}",
                            self.kind(&content["schema"])
                        ));
                    }
                }
                for (status, response) in operation["responses"].as_object().unwrap() {
                    let response = self.resolve(response);
                    lines.insert(format!("{name} answers {status}"));
                    for (kind, content) in response["content"].as_object().into_iter().flatten() {
                        // Ours has no plain-text errors.
                        if status.starts_with('2') || kind == "application/json" {
                            lines.insert(format!(
                                "{name} answers {status} {kind}: {}",
                                self.kind(&content["schema"])
                            ));
                        }
                    }
                }
            }
        }
    }

    fn schemas(&self, lines: &mut BTreeSet<String>) {
        for (name, schema) in self.0["components"]["schemas"].as_object().unwrap() {
            let required: BTreeSet<&str> =
                schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            for (member, value) in schema["properties"].as_object().into_iter().flatten() {
                lines.insert(format!(
                    "{name}.{member}: {}{}",
                    self.kind(value),
                    if required.contains(member.as_str()) { ", required" } else { "" }
                ));
                if let Some(default) = value.get("default").filter(|d| !d.is_null()) {
                    lines.insert(format!("{name}.{member} defaults to {default}"));
                }
            }
        }
    }
}

fn lines(document: &Value) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    let reader = Reader(document);
    reader.operations(&mut lines);
    reader.schemas(&mut lines);
    lines
}

fn served() -> BTreeSet<String> {
    lines(&serde_json::to_value(osb_server::openapi()).unwrap())
}

fn listed(text: &str) -> BTreeSet<String> {
    text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

#[test]
fn what_the_reference_has_is_served_or_listed_as_missing() {
    if let Ok(path) = std::env::var("OSB_REFERENCE_OPENAPI") {
        let document = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let text: String = lines(&document).into_iter().map(|line| line + "\n").collect();
        let target = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/openapi.txt");
        std::fs::write(target, text).unwrap();
        return;
    }
    let (served, reference, missing) = (served(), listed(REFERENCE), listed(MISSING));
    let lacking: Vec<_> = reference.difference(&served).filter(|line| !missing.contains(*line)).collect();
    assert!(lacking.is_empty(), "not served and not listed:\n{lacking:#?}");
    let stale: Vec<_> =
        missing.iter().filter(|line| served.contains(*line) || !reference.contains(*line)).collect();
    assert!(stale.is_empty(), "listed as missing and served, or not in the reference:\n{stale:#?}");
}

#[test]
fn schemas_name_nothing_that_is_not_there() {
    let document = serde_json::to_value(osb_server::openapi()).unwrap();
    let text = document.to_string();
    for part in text.split("\"$ref\":\"#").skip(1) {
        let pointer = part.split('"').next().unwrap();
        assert!(document.pointer(pointer).is_some(), "{pointer}");
    }
}
