//! The heat map as text.

use std::fmt::Write;

use crate::config::PAGE_SIZE_BYTES;
use crate::size::ByteSize;
use crate::status::heat::{BlockStatus, ExtentStatus, HeatStatus};

/// Blocks per line.
const COLUMNS: usize = 64;

/// Meaning of the characters.
const LEGEND: &str = "\
.  never written, or all zero        -  touched, and nothing of it is here
1 to 9  tenths of what was touched that are here     #  all of it is here
*  here, or a part of it, and as many faults in 20 s as a quarter of its pages
";

/// Formats the map; blocks with recent faults are in colour if `colour` is set.
#[must_use]
pub fn map(heat: &HeatStatus, colour: bool) -> String {
    let mut text = String::new();
    let size = |pages: u64| ByteSize::from_bytes(pages.saturating_mul(PAGE_SIZE_BYTES));
    let seen = if heat.pages_looked_at == heat.pages {
        "every page was looked at".to_owned()
    } else {
        format!(
            "{} of {} pages were looked at, in 4 places of each block",
            heat.pages_looked_at, heat.pages
        )
    };
    push(
        &mut text,
        &format!(
            "a character is {}; {seen}",
            size(heat.block_pages.into()).rounded()
        ),
    );
    text.push_str(LEGEND);
    for extent in &heat.extents {
        let home = match extent.home {
            0 => "here".to_owned(),
            donor => format!("on node {donor}"),
        };
        text.push('\n');
        push(
            &mut text,
            &format!("{} at home {home}", size(extent.pages.into()).rounded()),
        );
        push_rows(&mut text, extent, colour);
    }
    text
}

fn push_rows(text: &mut String, extent: &ExtentStatus, colour: bool) {
    let mut page = u64::from(extent.first_page);
    for row in extent.blocks.chunks(COLUMNS) {
        let blocks: String = row
            .iter()
            .map(|block| {
                if colour && block.recent_faults > 0 {
                    // SGR 33, yellow: ECMA-48, section 8.3.117.
                    format!("\x1b[33m{}\x1b[0m", character(block))
                } else {
                    character(block).to_string()
                }
            })
            .collect();
        push(text, &format!("{:#015x}  {blocks}", page * PAGE_SIZE_BYTES));
        page += row.iter().map(|block| u64::from(block.pages)).sum::<u64>();
    }
}

/// Returns the character for a block.
pub(in crate::status) fn character(block: &BlockStatus) -> char {
    let here = block.resident + block.leaving + block.arriving;
    let touched = here + block.remote;
    if touched == 0 {
        '.'
    } else if here == 0 {
        '-'
    } else if block.recent_faults > 0 && block.recent_faults >= block.pages / 4 {
        '*'
    } else if block.remote == 0 {
        '#'
    } else {
        // A partly local block is shown as neither none nor all.
        let tenths = u64::from(here) * 10 / u64::from(touched);
        let digit = u32::try_from(tenths.clamp(1, 9)).unwrap_or(9);
        char::from_digit(digit, 10).unwrap_or('9')
    }
}

fn push(text: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{}", line.trim_end());
}
