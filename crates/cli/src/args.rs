//! Arguments that many commands share.

use clap::{Args, ValueEnum};
use osb_client::{PaginationInfo, Sandbox};

use crate::output::{Format, RawFormat, Row};
use crate::settings::Context;
use crate::streams::Streams;

/// The sandbox to work on.
#[derive(Debug, Clone, Args)]
pub struct SandboxArg {
    /// Id of the sandbox
    sandbox_id: String,
}

impl SandboxArg {
    pub(crate) fn handle(&self, context: &Context) -> Sandbox {
        context.sandbox(&self.sandbox_id)
    }
}

/// `-o` of commands whose answer is data.
#[derive(Debug, Clone, Copy, Args)]
pub struct OutputArg {
    /// Form of the output
    #[arg(short, long, value_enum, ignore_case = true, default_value_t, value_name = "FORMAT")]
    pub(crate) output: Format,
}

impl OutputArg {
    /// One page of a list, with the number of pages.
    pub(crate) async fn page(
        self,
        context: &Context,
        headings: &[&str],
        rows: Vec<Row>,
        items: Vec<serde_json::Value>,
        page: &PaginationInfo,
        streams: &mut Streams,
    ) -> anyhow::Result<()> {
        let json = serde_json::json!({
            "items": items,
            "pagination": {
                "page": page.page,
                "page_size": page.page_size,
                "total_items": page.total_items,
                "total_pages": page.total_pages,
                "has_next_page": page.has_next_page,
            },
        });
        context.printer(self.output).list(streams, headings, rows, &json).await?;
        if page.has_next_page && self.output == Format::Table {
            let next = page.page + 1;
            streams
                .note(&format!("page {} of {}; more with --page {next}", page.page, page.total_pages))
                .await;
        }
        Ok(())
    }
}

/// `-o` of commands whose answer may also be had bare.
#[derive(Debug, Clone, Copy, Args)]
pub struct RawOutputArg {
    /// Form of the output; raw is the bare text
    #[arg(short, long, value_enum, ignore_case = true, default_value_t, value_name = "FORMAT")]
    pub(crate) output: RawFormat,
}

/// `-o` of commands that pass bytes through.
#[derive(Debug, Clone, Copy, Args)]
pub struct OnlyRawArg {
    /// Form of the output
    #[arg(
        short,
        long,
        value_enum,
        ignore_case = true,
        default_value_t,
        value_name = "FORMAT",
        hide_default_value = true
    )]
    output: OnlyRaw,
}

/// The one form of such commands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnlyRaw {
    /// The bytes themselves
    #[default]
    Raw,
}

/// `--page` and `--page-size`.
#[derive(Debug, Clone, Copy, Args)]
pub struct PageArgs {
    /// Page, from 1
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) page: Option<u32>,
    /// Items per page
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) page_size: Option<u32>,
}

/// Reads `KEY=VALUE`; the value may be empty and may hold `=`.
pub(crate) fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("use KEY=VALUE".to_owned()),
    }
}

/// The names of an enum's values, for messages.
pub(crate) fn names<T: ValueEnum>() -> String {
    let names: Vec<String> = T::value_variants()
        .iter()
        .filter_map(ValueEnum::to_possible_value)
        .map(|value| value.get_name().to_owned())
        .collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs() {
        assert_eq!(key_value("A=b=c"), Ok(("A".to_owned(), "b=c".to_owned())));
        assert_eq!(key_value("A="), Ok(("A".to_owned(), String::new())));
        assert!(key_value("A").is_err() && key_value("=x").is_err());
    }

    #[test]
    fn values_are_named_as_they_are_given() {
        assert_eq!(names::<RawFormat>(), "table, json, yaml, raw");
    }
}
