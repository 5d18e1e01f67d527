//! "Did you mean": names, and sandboxes whose id or name resembles what was asked for.

use osb_client::{Error, ListFilter, SandboxInfo};

use crate::settings::Context;

/// Sandboxes that are looked through.
const PAGE: u32 = 200;
/// Sandboxes that are named.
const SHOWN: usize = 3;
/// Label that people use as a name.
const NAME: &str = "name";

/// Likeness from which a name may be meant.
const ALIKE: f64 = 0.75;

/// The name that is most like `word`, when one is.
pub(crate) fn nearest<T: AsRef<str>>(word: &str, names: &[T]) -> Option<String> {
    let like =
        |name: &str| strsim::normalized_damerau_levenshtein(&word.to_lowercase(), &name.to_lowercase());
    names
        .iter()
        .map(|name| (like(name.as_ref()), name.as_ref()))
        .filter(|(like, _)| *like >= ALIKE)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, name)| name.to_owned())
}

/// A hint for an error that says that there is no such sandbox.
pub(crate) async fn for_error(context: &Context, error: &anyhow::Error) -> Option<String> {
    let asked = context.asked()?;
    let about_sandbox = error
        .downcast_ref::<Error>()
        .is_some_and(|error| error.code().is_some_and(|code| code.ends_with("SANDBOX_NOT_FOUND")));
    if !about_sandbox {
        return None;
    }
    let filter = ListFilter { page_size: Some(PAGE), ..ListFilter::default() };
    let list = context.client.list(&filter).await.ok()?;
    Some(hint(&asked, &list.items))
}

fn hint(asked: &str, sandboxes: &[SandboxInfo]) -> String {
    let matching: Vec<String> = sandboxes
        .iter()
        .filter_map(|info| {
            let name = info.metadata.as_ref().and_then(|labels| labels.get(NAME));
            let by_id = !asked.is_empty() && info.id.starts_with(&asked.to_ascii_lowercase());
            let by_name =
                name.is_some_and(|name| name == asked || (name.starts_with(asked) && asked.len() > 2));
            match (by_id || by_name, name) {
                (false, _) => None,
                (true, Some(name)) => Some(format!("{} (name={name})", info.id)),
                (true, None) => Some(info.id.clone()),
            }
        })
        .collect();
    match matching.len() {
        0 if sandboxes.is_empty() => "there are no sandboxes; `osb sandbox create` makes one".to_owned(),
        0 => "`osb sandbox list` shows those that exist; ids are to be given in full".to_owned(),
        1 => format!("did you mean {}?", matching[0]),
        n if n > SHOWN => format!("did you mean one of {n}: {}, …?", matching[..SHOWN].join(", ")),
        _ => format!("did you mean one of {}?", matching.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, name: Option<&str>) -> SandboxInfo {
        serde_json::from_value(serde_json::json!({
            "id": id, "status": {"state": "Running"}, "entrypoint": [], "createdAt": "2026-11-30T17:49:18Z",
            "metadata": name.map(|name| serde_json::json!({"name": name})).unwrap_or_default(),
        }))
        .unwrap()
    }

    #[test]
    fn beginnings_of_ids_and_names() {
        let all = [sandbox("abc1", None), sandbox("abc2", Some("web")), sandbox("def", Some("worker"))];
        assert_eq!(
            hint("abc1x", &all),
            "`osb sandbox list` shows those that exist; ids are to be given in full"
        );
        assert_eq!(hint("d", &all), "did you mean def (name=worker)?");
        assert_eq!(hint("ABC", &all), "did you mean one of abc1, abc2 (name=web)?");
        assert_eq!(hint("web", &all), "did you mean abc2 (name=web)?");
        assert_eq!(hint("work", &all), "did you mean def (name=worker)?");
        assert_eq!(hint("x", &[]), "there are no sandboxes; `osb sandbox create` makes one");
        let many: Vec<_> = (0..5).map(|n| sandbox(&format!("a{n}"), None)).collect();
        assert_eq!(hint("a", &many), "did you mean one of 5: a0, a1, a2, …?");
    }
}
