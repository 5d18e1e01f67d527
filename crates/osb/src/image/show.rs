//! What image commands print.

use std::sync::Arc;

use osb_cli::{Cell, Streams};
use osb_engine::image::{Image, ImageStore, Removed};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

use super::CommonArgs;

/// A list of images.
pub(super) async fn list(
    store: &ImageStore,
    images: &[Arc<Image>],
    common: &CommonArgs,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    if common.is_raw() {
        return lines(images.iter().map(|image| image.reference.clone()), streams).await;
    }
    let sandboxes = store.sandboxes_of(images)?;
    let running = |image: &Image| sandboxes.get(&image.id).map_or(0, Vec::len);
    let rows = images
        .iter()
        .map(|image| {
            vec![
                Cell::from(&image.reference),
                Cell::from(short_id(&image.id)),
                Cell::from(size_in_words(image.size_bytes)),
                Cell::optional(image.created.map(to_second)),
                Cell::optional(store.last_used(image).map(to_second)),
                Cell::from(running(image)),
            ]
        })
        .collect();
    let json: Vec<Value> = images
        .iter()
        .map(|image| {
            let mut value = to_json(store, image);
            value["sandboxes"] = running(image).into();
            value
        })
        .collect();
    let headings = ["name", "id", "size", "created", "last used", "sandboxes"];
    common.printer(streams).list(streams, &headings, rows, &json).await
}

/// One image, whole.
pub(super) async fn inspect(
    store: &ImageStore,
    image: &Image,
    common: &CommonArgs,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    if common.is_raw() {
        return lines([image.id.clone()], streams).await;
    }
    let config = &image.config;
    let sandboxes = store.sandboxes(image)?;
    let aliases: Vec<_> = store
        .aliases()?
        .into_keys()
        .filter(|alias| {
            store.resolve(alias).is_ok_and(|found| found.is_some_and(|found| found.id == image.id))
        })
        .collect();
    let words = |words: &[String]| Cell::from(words.join(" "));
    let mut properties = vec![
        ("name", Cell::from(&image.reference)),
        ("id", Cell::from(&image.id)),
        ("aliases", Cell::from(aliases.join(", "))),
        ("size", Cell::from(size_in_words(image.size_bytes))),
        ("created", Cell::optional(image.created)),
        ("last used", Cell::optional(store.last_used(image).map(to_second))),
        ("platform", Cell::from(format!("{}/{}", config.os, config.architecture))),
        ("user", Cell::optional(config.user.as_ref())),
        ("workdir", Cell::optional(config.workdir.as_ref())),
        ("entrypoint", words(&config.entrypoint)),
        ("cmd", words(&config.cmd)),
        ("ports", Cell::from(config.exposed_ports.join(", "))),
        ("volumes", Cell::from(config.volumes.join(", "))),
        ("stop signal", Cell::optional(config.stop_signal.as_ref())),
    ];
    properties.extend(config.env.iter().map(|(name, value)| ("env", Cell::from(format!("{name}={value}")))));
    properties
        .extend(config.labels.iter().map(|(name, value)| ("label", Cell::from(format!("{name}={value}")))));
    properties.push(("sandboxes", Cell::from(sandboxes.join(", "))));
    let mut json = to_json(store, image);
    json["aliases"] = aliases.into();
    json["sandboxes"] = sandboxes.into();
    common.printer(streams).object(streams, properties, &json).await
}

/// What was removed, or would be.
pub(super) async fn removed(
    removed: &Removed,
    pretended: bool,
    common: &CommonArgs,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    if common.is_raw() {
        return lines(removed.names.iter().cloned(), streams).await;
    }
    let printer = common.printer(streams);
    if common.output != super::Output::Table {
        let json = json!({
            "dry_run": pretended,
            "names": removed.names,
            "images": removed.images,
            "layers": removed.layers,
            "bytes": removed.bytes,
            "kept_layers": removed.kept,
            "kept_bytes": removed.kept_bytes,
        });
        return printer.data(streams, &json).await;
    }
    let verb = if pretended { "would remove" } else { "removed" };
    for name in &removed.names {
        printer.done(streams, &format!("{verb} {name}")).await?;
    }
    let freed = size_in_words(removed.bytes);
    let layers = counted(removed.layers, "layer");
    let freeing = if pretended { "would free" } else { "freed" };
    printer.done(streams, &format!("{freeing} {freed} ({layers})")).await?;
    if removed.kept > 0 {
        let kept = format!(
            "{} ({}) of removed images stay until the sandboxes that need them have ended",
            counted(removed.kept, "layer"),
            size_in_words(removed.kept_bytes)
        );
        streams.note(&kept).await;
    }
    Ok(())
}

/// All aliases and what they stand for.
pub(super) async fn aliases(
    store: &ImageStore,
    common: &CommonArgs,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    let aliases = store.aliases()?;
    if common.is_raw() {
        return lines(aliases.into_keys(), streams).await;
    }
    let rows = aliases.iter().map(|(name, target)| vec![Cell::from(name), Cell::from(target)]).collect();
    let json: Vec<_> = aliases.iter().map(|(name, target)| json!({"name": name, "target": target})).collect();
    common.printer(streams).list(streams, &["name", "target"], rows, &json).await
}

async fn lines(texts: impl IntoIterator<Item = String>, streams: &mut Streams) -> anyhow::Result<()> {
    let text: String = texts.into_iter().map(|text| text + "\n").collect();
    streams.stdout.write_all(text.as_bytes()).await?;
    Ok(streams.stdout.flush().await?)
}

fn to_json(store: &ImageStore, image: &Image) -> Value {
    json!({
        "name": image.reference,
        "id": image.id,
        "size_bytes": image.size_bytes,
        "created": image.created.map(|at| at.to_string()),
        "last_used": store.last_used(image).map(|at| to_second(at).to_string()),
        "config": image.config,
        "layers": image.roots.iter().flat_map(|root| &root.lowers).collect::<Vec<_>>(),
    })
}

fn to_second(at: jiff::Timestamp) -> jiff::Timestamp {
    jiff::Timestamp::from_second(at.as_second()).unwrap_or(at)
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn short_id(id: &str) -> &str {
    let hex = id.strip_prefix("sha256:").unwrap_or(id);
    hex.get(..12).unwrap_or(hex)
}

pub(super) fn size_in_words(bytes: u64) -> String {
    #[allow(clippy::cast_precision_loss)] // Shown with one digit.
    let mut amount = bytes as f64;
    for unit in ["B", "KiB", "MiB"] {
        if amount < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{amount:.1} {unit}") };
        }
        amount /= 1024.0;
    }
    format!("{amount:.1} GiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_ids_are_short() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")]
        {
            assert_eq!(size_in_words(bytes), text);
        }
        assert_eq!(short_id("sha256:0123456789abcdef"), "0123456789ab");
        assert_eq!(short_id("host"), "host");
        assert_eq!((counted(1, "layer"), counted(0, "layer")), ("1 layer".into(), "0 layers".into()));
    }
}
