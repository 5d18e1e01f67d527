//! Tables, JSON and YAML.

use clap::ValueEnum;
use serde::Serialize;
use unicode_width::UnicodeWidthStr as _;

use crate::streams::Streams;

/// Forms of output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Columns for people
    #[default]
    Table,
    /// One JSON document for programs
    Json,
    /// The same as YAML
    Yaml,
}

/// Forms of output where there is also a bare one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum RawFormat {
    /// Columns for people
    #[default]
    Table,
    /// One JSON document for programs
    Json,
    /// The same as YAML
    Yaml,
    /// The text itself
    Raw,
}

impl RawFormat {
    /// The form of the data; `None` when the bare text is wanted.
    #[must_use]
    pub fn structured(self) -> Option<Format> {
        match self {
            Self::Table => Some(Format::Table),
            Self::Json => Some(Format::Json),
            Self::Yaml => Some(Format::Yaml),
            Self::Raw => None,
        }
    }
}

/// A value in a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cell(String);

impl<T: ToString> From<T> for Cell {
    fn from(value: T) -> Self {
        let text = value.to_string();
        Self(if text.is_empty() { "-".to_owned() } else { printable(&text) })
    }
}

impl Cell {
    /// The value, or a dash where there is none.
    pub fn optional<T: ToString>(value: Option<T>) -> Self {
        value.map_or_else(|| Self("-".to_owned()), Self::from)
    }
}

impl Cell {
    /// A value of JSON: text bare, null as a dash, all else as it is written.
    #[must_use]
    pub fn of_json(value: &serde_json::Value) -> Self {
        match value {
            serde_json::Value::Null => Self::optional(None::<&str>),
            serde_json::Value::String(text) => Self::from(text),
            other => Self::from(other),
        }
    }
}

/// Cells of one line.
pub type Row = Vec<Cell>;

/// Text with its control characters made visible: names come from sandboxes, and a terminal obeys what it is
/// sent.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut shown, c| {
        if is_order(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
        shown
    })
}

/// As [`printable`], but lines stay lines.
#[must_use]
pub(crate) fn printable_lines(text: &str) -> String {
    let keeps = |c| matches!(c, '\n' | '\t');
    text.split_inclusive(keeps).fold(String::with_capacity(text.len()), |shown, part| {
        let bare = part.strip_suffix(keeps).unwrap_or(part);
        shown + &printable(bare) + &part[bare.len()..]
    })
}

/// Whether a terminal does something at a character instead of showing it: control characters, separators of lines,
/// and all that turns the direction of the text around it.
fn is_order(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{061C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// The beginning of a text that needs no more than `width` columns, with a mark where something is left out.
fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut shown = String::new();
    for c in text.chars() {
        shown.push(c);
        // As a whole: what is joined with its neighbours is narrower than its parts.
        if shown.width() >= width {
            shown.pop();
            break;
        }
    }
    shown.push('…');
    shown
}

/// Columns of a list that a terminal has no room for, and where the rest is cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room<'a> {
    /// Columns of the terminal.
    pub(crate) width: usize,
    /// Headings of the columns that may go, the least important first.
    pub(crate) spare: &'a [&'a str],
}

/// Between two columns.
const GAP: usize = 2;

/// A table that needs no more than the room there is: columns go in their order, then the first one is cut.
pub(crate) fn fitted(headings: &[&str], rows: Vec<Row>, room: Room<'_>) -> (Vec<String>, Vec<Row>) {
    let mut kept: Vec<usize> = (0..headings.len()).collect();
    let widths: Vec<usize> = (0..headings.len())
        .map(|at| {
            let cells = rows.iter().filter_map(|row| row.get(at)).map(|Cell(text)| text.width());
            cells.max().unwrap_or(0).max(headings[at].width())
        })
        .collect();
    let rest = |kept: &[usize]| kept.iter().skip(1).map(|&at| widths[at] + GAP).sum::<usize>();
    let mut spare = room.spare.iter();
    while rest(&kept) + kept.first().map_or(0, |&at| widths[at]) > room.width {
        let Some(next) = spare.next() else { break };
        kept.retain(|&at| headings[at] != *next);
    }
    let first = room.width.saturating_sub(rest(&kept)).max(MIN_FIRST);
    let cells = |row: Row| -> Row {
        let shown = kept.iter().filter_map(|&at| row.get(at).cloned());
        shown
            .enumerate()
            .map(|(at, Cell(text))| Cell(if at == 0 { cut(&text, first) } else { text }))
            .collect()
    };
    let names = kept.iter().map(|&at| headings[at].to_uppercase()).collect();
    (names, rows.into_iter().map(cells).collect())
}

/// What is left of the first column at least: the beginning of an id tells sandboxes apart.
const MIN_FIRST: usize = 8;

/// Writes answers in the form asked for.
#[derive(Debug, Clone, Copy)]
pub struct Printer {
    /// Form.
    pub format: Format,
    /// Whether headings are set off by colour.
    pub color: bool,
}

impl Printer {
    /// Writes a list: rows under headings, or `json`.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub async fn list(
        &self,
        streams: &mut Streams,
        headings: &[&str],
        rows: Vec<Row>,
        json: &impl Serialize,
    ) -> anyhow::Result<()> {
        match self.format {
            Format::Json | Format::Yaml => self.data(streams, json).await,
            Format::Table => {
                let headings: Vec<String> = headings.iter().map(|h| h.to_uppercase()).collect();
                let rows = match (streams.size)() {
                    // One endless value must not take the others out of sight.
                    Some((width, _)) => rows.into_iter().map(|row| shortened(row, width)).collect(),
                    None => rows,
                };
                let text = table(&headings, &rows, self.color);
                Ok(streams.out(text.as_bytes()).await?)
            }
        }
    }

    /// Writes one thing: a line per property, or `json`.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub async fn object(
        &self,
        streams: &mut Streams,
        properties: Vec<(&str, Cell)>,
        json: &impl Serialize,
    ) -> anyhow::Result<()> {
        match self.format {
            Format::Json | Format::Yaml => self.data(streams, json).await,
            Format::Table => {
                let width = properties.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
                let mut text = String::new();
                for (name, Cell(value)) in properties {
                    let padding = " ".repeat(width - name.len());
                    text.push_str(&format!("{}{padding}  {value}\n", bold(name, self.color)));
                }
                Ok(streams.out(text.as_bytes()).await?)
            }
        }
    }

    /// Says that something was done.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub async fn done(&self, streams: &mut Streams, message: &str) -> anyhow::Result<()> {
        match self.format {
            Format::Json | Format::Yaml => {
                self.data(streams, &serde_json::json!({"status": "ok", "message": message})).await
            }
            Format::Table => {
                let label = if self.color { "\x1b[32mOK:\x1b[0m" } else { "OK:" };
                Ok(streams.out(format!("{label} {}\n", printable(message)).as_bytes()).await?)
            }
        }
    }

    /// Writes `value` for programs; there is no table of it.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub async fn data(&self, streams: &mut Streams, value: &impl Serialize) -> anyhow::Result<()> {
        let text = match self.format {
            Format::Yaml => yaml(value)?,
            Format::Json | Format::Table => serde_json::to_string_pretty(value)? + "\n",
        };
        Ok(streams.out(text.as_bytes()).await?)
    }
}

/// YAML with sorted keys.
fn yaml(value: &impl Serialize) -> anyhow::Result<String> {
    // By way of JSON's value: its objects are sorted, and what it cannot hold the wire cannot either.
    let mut text = serde_saphyr::to_string(&serde_json::to_value(value)?)?;
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

fn shortened(row: Row, width: usize) -> Row {
    row.into_iter().map(|Cell(text)| Cell(cut(&text, width.max(MIN_FIRST)))).collect()
}

/// A value wider than this does not make its column wider: the other lines would be mostly blanks.
const WIDE: usize = 200;

pub(crate) fn table(headings: &[String], rows: &[Row], color: bool) -> String {
    let mut widths: Vec<usize> = headings.iter().map(|heading| heading.width()).collect();
    for row in rows {
        for (width, Cell(text)) in widths.iter_mut().zip(row) {
            let needed = text.width();
            if needed <= WIDE {
                *width = (*width).max(needed);
            }
        }
    }
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>, strong: bool| {
        let mut padding = 0;
        for (cell, width) in cells.zip(&widths) {
            text.push_str(&" ".repeat(padding));
            text.push_str(&bold(cell, strong));
            padding = width.saturating_sub(cell.width()) + GAP;
        }
        text.push('\n');
    };
    line(&mut headings.iter().map(String::as_str), color);
    for row in rows {
        line(&mut row.iter().map(|Cell(text)| text.as_str()), false);
    }
    text
}

fn bold(text: &str, color: bool) -> String {
    if color { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_without_trailing_blanks() {
        let rows =
            vec![vec![Cell::from("a"), Cell::from("Running")], vec![Cell::from("longer"), Cell::from("")]];
        let headings = ["ID".to_owned(), "STATUS".to_owned()];
        assert_eq!(table(&headings, &rows, false), "ID      STATUS\na       Running\nlonger  -\n");
        assert_eq!(table(&headings, &[], true), "\x1b[1mID\x1b[0m  \x1b[1mSTATUS\x1b[0m\n");
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let rows = vec![vec![Cell::from("日本"), Cell::from("x")]];
        assert_eq!(table(&["A".to_owned(), "B".to_owned()], &rows, false), "A     B\n日本  x\n");
    }

    #[test]
    fn yaml_is_sorted_and_quotes_what_would_be_read_as_something_else() {
        let value = serde_json::json!({
            "b": ["true", "yes", "No", "1", "0x1F", "1e3", "~", "null", "12:30:00", "2026-11-30", "- x: y", ""],
            "a": {"z": [1, 1.5, null, true, {}, []], "w": "two\nlines", "x": "2026-11-30T17:49:18Z"},
        });
        let text = "\
a:
  w: |-
    two
    lines
  x: \"2026-11-30T17:49:18Z\"
  z:
  - 1
  - 1.5
  - null
  - true
  - {}
  - []
b:
- \"true\"
- \"yes\"
- \"No\"
- \"1\"
- \"0x1F\"
- \"1e3\"
- \"~\"
- \"null\"
- \"12:30:00\"
- \"2026-11-30\"
- \"- x: y\"
- \"\"
";
        assert_eq!(yaml(&value).unwrap(), text);
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\n\r\u{202E}é"), "a\\u{1b}[2Jb\\n\\r\\u{202e}é");
        assert_eq!(Cell::from("x\x07").0, "x\\u{7}");
        assert_eq!(Cell::optional(None::<&str>).0, "-");
    }
}
