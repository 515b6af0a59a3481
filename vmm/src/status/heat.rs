//! The heat map: as JSON, and as text.

use std::fmt::Write;

use memory_fabric::heat::{BlockHeat, Heat};
use serde::{Deserialize, Serialize};

use crate::config::PAGE_SIZE_BYTES;
use crate::size::ByteSize;

/// Blocks on a line.
const COLUMNS: usize = 64;

/// Which part of memory is here, and which was touched lately.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HeatStatus {
    /// Pages of a block, but for those that an extent cuts.
    pub block_pages: u32,
    /// Pages of the guest.
    pub pages: u64,
    /// Pages that were looked at; fewer than `pages` when blocks were sampled.
    pub pages_looked_at: u64,
    /// Extents by rising address.
    pub extents: Vec<ExtentStatus>,
}

/// One extent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExtentStatus {
    /// Its first page.
    pub first_page: u32,
    /// How many.
    pub pages: u32,
    /// The node where they are at home.
    pub home: u16,
    /// Its blocks by rising address.
    pub blocks: Vec<BlockStatus>,
}

/// One block; see [`BlockHeat`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BlockStatus {
    /// Pages in it.
    pub pages: u32,
    /// Pages that were looked at: the next five add up to them.
    pub looked_at: u32,
    /// Here.
    pub resident: u32,
    /// Here, and about to go unless touched.
    pub leaving: u32,
    /// On their way here.
    pub arriving: u32,
    /// Only at home elsewhere.
    pub remote: u32,
    /// Never written, or all zero.
    pub untouched: u32,
    /// Pages that differ from what is at home.
    pub dirty: u32,
    /// Faults in the block in the last 10 to 20 s that brought a page, or found one about to go.
    pub recent_faults: u32,
}

impl From<&BlockHeat> for BlockStatus {
    fn from(heat: &BlockHeat) -> Self {
        Self {
            pages: heat.pages,
            looked_at: heat.looked_at,
            resident: heat.resident,
            leaving: heat.leaving,
            arriving: heat.arriving,
            remote: heat.remote,
            untouched: heat.untouched,
            dirty: heat.dirty,
            recent_faults: heat.recent_faults,
        }
    }
}

impl From<Heat> for HeatStatus {
    fn from(heat: Heat) -> Self {
        let extents = heat.extents.iter().map(|extent| ExtentStatus {
            first_page: extent.pages.first.number(),
            pages: extent.pages.count,
            home: extent.home.0,
            blocks: extent.blocks.iter().map(BlockStatus::from).collect(),
        });
        Self {
            block_pages: heat.block_pages,
            pages: heat.pages,
            pages_looked_at: heat.pages_looked_at,
            extents: extents.collect(),
        }
    }
}

/// What the characters mean.
const LEGEND: &str = "\
.  never written, or all zero        -  touched, and nothing of it is here
1 to 9  tenths of what was touched that are here     #  all of it is here
*  here in part, with faults in the last 20 s on a quarter of its pages or more
";

impl HeatStatus {
    /// The map as text; blocks with recent faults are in colour if `colour` is set.
    #[must_use]
    pub fn text(&self, colour: bool) -> String {
        let mut text = String::new();
        let size = |pages: u64| ByteSize::from_bytes(pages.saturating_mul(PAGE_SIZE_BYTES));
        let seen = if self.pages_looked_at == self.pages {
            "every page was looked at".to_owned()
        } else {
            format!(
                "{} of {} pages were looked at, in 4 places of each block",
                self.pages_looked_at, self.pages
            )
        };
        push(
            &mut text,
            &format!(
                "a character is {}; {seen}",
                size(self.block_pages.into()).rounded()
            ),
        );
        text.push_str(LEGEND);
        for extent in &self.extents {
            let home = match extent.home {
                0 => "here".to_owned(),
                donor => format!("on node {donor}"),
            };
            text.push('\n');
            push(
                &mut text,
                &format!("{} at home {home}", size(extent.pages.into()).rounded()),
            );
            self.push_rows(&mut text, extent, colour);
        }
        text
    }

    fn push_rows(&self, text: &mut String, extent: &ExtentStatus, colour: bool) {
        let mut page = u64::from(extent.first_page);
        for row in extent.blocks.chunks(COLUMNS) {
            let blocks: String = row
                .iter()
                .map(|block| {
                    if colour && block.recent_faults > 0 {
                        // SGR 33, yellow: ECMA-48, section 8.3.117.
                        format!("\x1b[33m{}\x1b[0m", block.character())
                    } else {
                        block.character().to_string()
                    }
                })
                .collect();
            push(text, &format!("{:#015x}  {blocks}", page * PAGE_SIZE_BYTES));
            page += row.iter().map(|block| u64::from(block.pages)).sum::<u64>();
        }
    }
}

impl BlockStatus {
    /// The character that stands for it.
    #[must_use]
    pub fn character(&self) -> char {
        let here = self.resident + self.leaving + self.arriving;
        let touched = here + self.remote;
        if touched == 0 {
            '.'
        } else if here == 0 {
            '-'
        } else if self.recent_faults > 0 && self.recent_faults >= self.pages / 4 {
            '*'
        } else if self.remote == 0 {
            '#'
        } else {
            // Something is here and something is not: neither none nor all.
            let tenths = u64::from(here) * 10 / u64::from(touched);
            let digit = u32::try_from(tenths.clamp(1, 9)).unwrap_or(9);
            char::from_digit(digit, 10).unwrap_or('9')
        }
    }
}

fn push(text: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{}", line.trim_end());
}
