//! The heat map, and the local part of each node's memory.

use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};

use crate::status::heat::HeatStatus;
use crate::status::screen;

/// Formats the map as lines, optionally in colours.
pub(super) fn lines(heat: &HeatStatus, colour: bool) -> Vec<Line<'static>> {
    let text = screen::heat::map(heat, false);
    text.lines().map(|line| coloured(line, colour)).collect()
}

/// Splits the blocks of a line into spans of one colour.
fn coloured(line: &str, colour: bool) -> Line<'static> {
    let Some((address, blocks)) = line.split_once("  ").filter(|_| line.starts_with("0x")) else {
        return Line::from(line.to_owned());
    };
    if !colour {
        return Line::from(line.to_owned());
    }
    let mut spans = vec![Span::from(format!("{address}  "))];
    let mut rest = blocks.chars().peekable();
    while let Some(first) = rest.next() {
        let mut run = String::from(first);
        while let Some(next) = rest.next_if(|next| style(*next) == style(first)) {
            run.push(next);
        }
        spans.push(Span::styled(run, style(first)));
    }
    Line::from(spans)
}

fn style(block: char) -> Style {
    match block {
        '*' => Style::new().fg(Color::Yellow),
        '#' => Style::new().fg(Color::Green),
        '1'..='9' => Style::new().fg(Color::Cyan),
        _ => Style::new().fg(Color::DarkGray),
    }
}

/// Returns the fraction of a node's home pages that are local; `None` without any.
pub(super) fn part_here(heat: &HeatStatus, node: u32) -> Option<f64> {
    let extents = heat
        .extents
        .iter()
        .filter(|extent| u32::from(extent.home) == node);
    let (mut here, mut all) = (0_u64, 0_u64);
    for block in extents.flat_map(|extent| &extent.blocks) {
        here += u64::from(block.resident + block.leaving);
        all += u64::from(block.looked_at);
    }
    #[allow(clippy::cast_precision_loss, reason = "a part to look at")]
    let part = here as f64 / all as f64;
    (all > 0).then_some(part)
}
