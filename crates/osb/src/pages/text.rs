//! Our own pages, which are Markdown, as plain text for a terminal.

/// Columns of a line.
const WIDTH: usize = 80;
/// Least columns that the last cell of a table needs; with less, each cell gets lines of its own.
const LAST_CELL: usize = 36;
/// What separates the columns of a table.
const GAP: usize = 2;

/// A page as text.
pub(super) fn render(markdown: &str) -> String {
    let mut out = String::new();
    let mut lines = markdown.lines().peekable();
    while let Some(line) = lines.next() {
        if line.starts_with("```") {
            for code in lines.by_ref().take_while(|line| !line.starts_with("```")) {
                out.push_str(format!("    {code}").trim_end());
                out.push('\n');
            }
        } else if let Some((level, title)) = heading(line) {
            let title = inline(title);
            let under = if level == 1 { "=" } else { "-" }.repeat(title.chars().count());
            out.push_str(&format!("{title}\n{under}\n"));
        } else if line.starts_with('|') {
            let mut rows = vec![cells(line)];
            while let Some(row) = lines.next_if(|line| line.starts_with('|')) {
                rows.push(cells(row));
            }
            table(&rows, &mut out);
        } else if line.starts_with("<!--") {
            // A word for whoever edits the page.
        } else if line.is_empty() {
            if !out.is_empty() && !out.ends_with("\n\n") {
                out.push('\n');
            }
        } else {
            let (mark, text) = marked(line);
            let mut text = text.to_owned();
            while let Some(more) = lines.next_if(|line| !begins_block(line)) {
                text.push(' ');
                text.push_str(more.trim());
            }
            let indent = " ".repeat(mark.chars().count());
            wrap(&inline(&text), mark, &indent, &mut out);
        }
    }
    out
}

/// The rows of a page's tables whose first cell `wanted` takes, each with its headings, as text.
pub(super) fn rows(markdown: &str, wanted: impl Fn(&str) -> bool) -> String {
    let mut out = String::new();
    let mut headings = None;
    for line in markdown.lines() {
        if !line.starts_with('|') {
            headings = None;
            continue;
        }
        let row = cells(line);
        match &headings {
            None => headings = Some(row),
            Some(headings) if row.first().is_some_and(|first| wanted(first)) => {
                described(headings, &row, &mut out);
            }
            Some(_) => {}
        }
    }
    out
}

fn heading(line: &str) -> Option<(usize, &str)> {
    let title = line.trim_start_matches('#');
    let level = line.len() - title.len();
    (level > 0 && title.starts_with(' ')).then(|| (level, title.trim()))
}

fn begins_block(line: &str) -> bool {
    line.is_empty()
        || line.starts_with(['|', '#', '<'])
        || line.starts_with("```")
        || !marked(line).0.is_empty()
}

/// The mark of a list's item, and what follows it.
fn marked(line: &str) -> (&str, &str) {
    let digits = line.bytes().take_while(u8::is_ascii_digit).count();
    let length = match () {
        () if line.starts_with("- ") => 2,
        () if digits > 0 && line[digits..].starts_with(". ") => digits + 2,
        () => 0,
    };
    line.split_at(length)
}

/// The cells of a table's line.
fn cells(line: &str) -> Vec<String> {
    let line = line.trim().trim_start_matches('|').trim_end_matches('|').replace("\\|", "\0");
    let plain = |cell: &str| match cell.strip_prefix('`').and_then(|code| code.strip_suffix('`')) {
        Some(code) if !code.contains('`') => code.to_owned(),
        _ => inline(cell),
    };
    line.split('|').map(|cell| plain(cell.trim()).replace('\0', "|")).collect()
}

fn table(rows: &[Vec<String>], out: &mut String) {
    let Some((headings, rows)) = rows.split_first() else { return };
    let rows = rows.get(1..).unwrap_or_default();
    let width = |column: usize| {
        let cells = rows.iter().chain([headings]).filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let before: Vec<usize> = (0..headings.len().saturating_sub(1)).map(width).collect();
    let taken: usize = before.iter().map(|width| width + GAP).sum();
    if taken + LAST_CELL > WIDTH && taken + width(before.len()) > WIDTH {
        for row in rows {
            described(headings, row, out);
        }
        return;
    }
    let indent = " ".repeat(taken);
    let headed = headings.iter().any(|heading| !heading.is_empty());
    for row in headed.then_some(headings).into_iter().chain(rows) {
        let padded = before.iter().zip(row);
        let start: String = padded.map(|(width, cell)| format!("{cell:width$}{:GAP$}", "")).collect();
        wrap(row.get(before.len()).map_or("", String::as_str), &start, &indent, out);
    }
}

/// A row that is too wide for one line.
fn described(headings: &[String], row: &[String], out: &mut String) {
    let Some((first, rest)) = row.split_first() else { return };
    out.push_str(&format!("{first}\n"));
    for (heading, cell) in headings.iter().skip(1).zip(rest).filter(|(_, cell)| !cell.is_empty()) {
        let start = if heading.is_empty() { "    ".to_owned() } else { format!("    {heading}: ") };
        wrap(cell, &start, "      ", out);
    }
}

/// Text without its marks: code, emphasis, and links, of which those to other pages say how these are read.
fn inline(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['`', '*', '[']) {
        out.push_str(&rest[..at]);
        let mark = &rest[at..];
        rest = &mark[1..];
        if let Some((code, after)) = mark.strip_prefix('`').and_then(|code| code.split_once('`')) {
            // Several words are marked as one, so that it shows where a command ends.
            let tick = if code.contains(' ') { "`" } else { "" };
            out.push_str(&format!("{tick}{code}{tick}"));
            rest = after;
        } else if let Some(after) = mark.strip_prefix("**") {
            rest = after;
        } else if let Some((label, target, after)) = link(mark) {
            out.push_str(&inline(label));
            match target.split_once(".md").map(|(page, _)| page) {
                Some(page) if super::topics::find(page).is_some() && page == label => {
                    out.push_str(" (osb help)");
                }
                Some(page) if super::topics::find(page).is_some() => {
                    out.push_str(&format!(" (osb help {page})"));
                }
                _ if target.starts_with("http") && target != label => out.push_str(&format!(" ({target})")),
                _ => {}
            }
            rest = after;
        } else {
            out.push_str(&mark[..1]);
        }
    }
    out.push_str(rest);
    out
}

/// Label, target and what follows of a link at the beginning of the text.
fn link(text: &str) -> Option<(&str, &str, &str)> {
    let (label, rest) = text.strip_prefix('[')?.split_once("](")?;
    let (target, after) = rest.split_once(')')?;
    Some((label, target, after))
}

/// Breaks text between words. A word that is longer than a line stays whole.
fn wrap(text: &str, start: &str, indent: &str, out: &mut String) {
    let mut line = start.to_owned();
    let mut empty = true;
    for word in text.split_whitespace() {
        if !empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(line.trim_end());
            out.push('\n');
            line = indent.to_owned();
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    out.push_str(line.trim_end());
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_text() {
        let page = "# A `page`\n\nTwo\nlines, **one** `par a`graph: see [errors](errors.md) and [there](https://e.org/).\n\
                    \n- an item\n  that goes on\n1. first\n\n```sh\nosb  run\n```\n<!-- no -->\n";
        let text = "A page\n======\n\nTwo lines, one `par a`graph: see errors (osb help) and there (https://e.org/).\n\
                    \n- an item that goes on\n1. first\n\n    osb  run\n";
        assert_eq!(render(page), text);
    }

    #[test]
    fn long_lines_are_broken_between_words() {
        let text = render(&format!("- {}\n", "word ".repeat(40)));
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(text.lines().skip(1).all(|line| line.starts_with("  word")), "{text}");
        let long = "x".repeat(100);
        assert_eq!(render(&format!("a {long} b")), format!("a\n{long}\nb\n"));
    }

    #[test]
    fn tables_keep_columns_while_there_is_room() {
        let narrow = "| a | b |\n|---|---|\n| `x y` | one \\| two |\n| long | y |\n";
        assert_eq!(render(narrow), "a     b\nx y   one | two\nlong  y\n");
        let (key, meaning) = ("k".repeat(40), "word ".repeat(9));
        let wide = format!("| key | default | meaning |\n|---|---|---|\n| {key} | 1 | {meaning} |\n");
        let told = format!("{key}\n    default: 1\n    meaning: {}\n", meaning.trim_end());
        assert_eq!(render(&wide), told);
        assert_eq!(render("| | |\n|---|---|\n| a | b |\n"), "a  b\n");
    }

    #[test]
    fn rows_are_found_by_their_first_cell() {
        let page = "| code | what |\n|---|---|\n| `A` | one |\n| `B` | two |\n\n| x | y |\n|---|---|\n| `A` | three |\n";
        assert_eq!(rows(page, |first| first == "A"), "A\n    what: one\nA\n    y: three\n");
        assert_eq!(rows(page, |first| first == "C"), "");
    }
}
