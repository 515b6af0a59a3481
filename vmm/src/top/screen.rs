//! The layout of the screen.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Sparkline, Wrap};

use super::format::{count, number, pages_a_second, percent, size, time};
use super::rates::{NodeRates, Rates};
use super::{COLUMNS_MIN, ROWS_MIN, View, heat};
use crate::report::{DrainState, FaultKind, Percentiles, RebalanceState};
use crate::status::screen::duration;
use crate::status::{NodeNow, VmState, VmStatus};

/// Rows of the table of faults, with its heading.
const FAULT_ROWS: u16 = 8;
/// Rows for memory.
const MEMORY_ROWS: u16 = 4;
/// Columns from which the table of nodes has its widest form, without addresses.
const WIDE: u16 = 110;
/// Rows from which the heat map is below the numbers.
const TALL: u16 = 44;

/// Draws a view.
pub fn draw(view: &View, frame: &mut Frame<'_>) {
    let area = frame.area();
    if area.width < COLUMNS_MIN || area.height < ROWS_MIN {
        let text = format!(
            "This terminal has {} x {}; top needs {COLUMNS_MIN} x {ROWS_MIN}. Make it larger, or \
             press q and use `ssi-hv status`.",
            area.width, area.height
        );
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
        return;
    }
    let [head, problem, body, help] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(view.head(head.width), head);
    frame.render_widget(view.problem(problem.width), problem);
    frame.render_widget(view.help(), help);
    match &view.status {
        None if view.problem.is_none() => frame.render_widget(Line::from("Asking..."), body),
        None => {}
        Some(_) if view.shows_heat => view.draw_heat(frame, body),
        Some(status) => match &status.coherence {
            Some(coherence) => view.draw_shared(status, coherence, frame, body),
            None => view.draw_numbers(status, frame, body),
        },
    }
}

impl View {
    pub(super) fn style(&self, colour: Color) -> Style {
        if self.colour {
            Style::new().fg(colour)
        } else {
            Style::new()
        }
    }

    /// Returns the VM's line, with its position among all VMs.
    fn head(&self, columns: u16) -> Line<'_> {
        let place = self.choices.iter().position(|c| Some(c.pid) == self.chosen);
        let place = place.map_or(0, |place| place + 1);
        let which = match self.choices.len() {
            0 | 1 => String::new(),
            all => format!("VM {place} of {all}"),
        };
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let Some(status) = &self.status else {
            let name = self.choices.get(place.saturating_sub(1));
            let name = name.map_or(String::new(), |choice| choice.name.clone());
            return Line::from(vec![
                Span::styled(name, bold),
                Span::from(format!("  {which}")),
            ]);
        };
        let (state, colour) = match status.state {
            _ if self.has_ended => ("ended", Color::Red),
            VmState::Starting => ("starting", Color::Yellow),
            VmState::Running => ("running", Color::Green),
            VmState::Paused if status.paused_by_user => ("paused", Color::Yellow),
            VmState::Paused => ("waits for a donor", Color::Red),
            VmState::Ending => ("ending", Color::Yellow),
        };
        let pid = format!(" ({}) ", status.pid);
        // Parts without room are omitted, not truncated.
        let columns = usize::from(columns).saturating_sub(which.len() + 1);
        let mut used = status.name.len() + pid.len() + state.len();
        let mut rest = String::new();
        for part in [
            if self.is_held { ", picture held" } else { "" }.to_owned(),
            format!(", up {}", duration(status.uptime_s)),
            format!(
                "; {} vCPU, {} by {}",
                status.guest.cpus,
                size(status.guest.memory_bytes),
                status.transport.kind,
            ),
        ] {
            if used + part.len() <= columns {
                used += part.len();
                rest += &part;
            }
        }
        let gap = columns.saturating_sub(used) + 1;
        Line::from(vec![
            Span::styled(status.name.as_str(), bold),
            Span::from(pid),
            Span::styled(state, self.style(colour)),
            Span::from(rest),
            Span::from(" ".repeat(gap)),
            Span::from(which),
        ])
    }

    fn problem(&self, columns: u16) -> Line<'static> {
        let text = self.problem.clone().unwrap_or_default();
        Line::styled(shortened(text, columns), self.style(Color::Red))
    }

    fn help(&self) -> Line<'static> {
        let mut keys = vec!["q quit"];
        if self.choices.len() > 1 {
            keys.push("Tab next VM");
        }
        keys.push(if self.shows_heat {
            "h numbers"
        } else {
            "h heat map"
        });
        if self.shows_heat {
            keys.push("Up, Down scroll");
        }
        keys.push(if self.is_held { "p go on" } else { "p hold" });
        let style = Style::new().add_modifier(Modifier::REVERSED);
        Line::styled(format!(" {} ", keys.join("  |  ")), style)
    }

    fn draw_heat(&self, frame: &mut Frame<'_>, area: Rect) {
        let Some(heat) = &self.heat else {
            frame.render_widget(Line::from("Asking for the map..."), area);
            return;
        };
        let lines = heat::lines(heat, self.colour);
        let hidden = u16::try_from(lines.len())
            .unwrap_or(u16::MAX)
            .saturating_sub(area.height);
        let map = Paragraph::new(lines).scroll((self.scrolled.min(hidden), 0));
        frame.render_widget(map, area);
    }

    fn draw_numbers(&self, status: &VmStatus, frame: &mut Frame<'_>, area: Rect) {
        let tall = area.height >= TALL;
        let nodes = self.node_lines(status, area.width);
        let rate_rows = if tall { 7 } else { 3 };
        // The map, if displayed, has at least half of the remaining rows.
        let left = area
            .height
            .saturating_sub(rate_rows + FAULT_ROWS + 1 + MEMORY_ROWS + 1);
        let most = if tall { left / 2 } else { left };
        let nodes_rows = u16::try_from(nodes.len() + usize::from(tall)).unwrap_or(u16::MAX);
        let [rate, faults, memory, nodes_area, map] = Layout::vertical([
            Constraint::Length(rate_rows),
            Constraint::Length(FAULT_ROWS + 1),
            Constraint::Length(MEMORY_ROWS + 1),
            Constraint::Length(nodes_rows.min(most)),
            Constraint::Min(0),
        ])
        .areas(area);
        self.draw_rate(frame, rate);
        frame.render_widget(Paragraph::new(self.fault_lines(status)), faults);
        frame.render_widget(
            Paragraph::new(self.memory_lines(status, memory.width)),
            memory,
        );
        frame.render_widget(
            Paragraph::new(fitting(nodes, nodes_area.height)),
            nodes_area,
        );
        if tall {
            self.draw_heat(frame, map);
        }
    }

    /// Draws the rate of remote faults and its history.
    pub(super) fn draw_rate(&self, frame: &mut Frame<'_>, area: Rect) {
        let [text, picture] =
            Layout::horizontal([Constraint::Length(24), Constraint::Min(0)]).areas(area);
        let most = self.history.iter().max().copied().unwrap_or(0);
        let now = self.rates.as_ref().map(|rates| rates.remote);
        let lines = vec![
            Line::from(match self.status.as_ref().map(|status| &status.coherence) {
                Some(Some(_)) => "requests a second",
                _ => "remote faults a second",
            }),
            Line::styled(
                now.map_or("-".to_owned(), count),
                Style::new().add_modifier(Modifier::BOLD),
            ),
            Line::from(format!("the most here {}", number(most))),
        ];
        frame.render_widget(Paragraph::new(lines), text);
        let shown = self.history.len().saturating_sub(picture.width.into());
        let data: Vec<u64> = self.history.iter().skip(shown).copied().collect();
        let sparkline = Sparkline::default()
            .data(&data)
            .style(self.style(Color::Cyan));
        frame.render_widget(sparkline, picture);
    }

    fn fault_lines(&self, status: &VmStatus) -> Vec<Line<'static>> {
        let heading = columns("faults", "a second", "count", ["p50", "p90", "p99", "max"]);
        let mut lines = vec![Line::styled(
            heading,
            Style::new().add_modifier(Modifier::UNDERLINED),
        )];
        let faults = &status.faults;
        let rate = |of: fn(&Rates) -> f64| self.rates.as_ref().map(of);
        lines.push(fault("remote", rate(|r| r.remote), &faults.remote));
        let stages = &faults.remote.stages;
        for (name, times) in [
            ("  queue", &stages.queue),
            ("  fetch", &stages.fetch),
            ("  install", &stages.install),
        ] {
            lines.push(Line::from(columns(name, "", "", percentiles(times))));
        }
        lines.push(fault("zero", rate(|r| r.zero), &faults.zero));
        lines.push(fault("minor", rate(|r| r.minor), &faults.minor));
        lines.push(fault(
            "first write",
            rate(|r| r.write_protect),
            &faults.write_protect,
        ));
        lines
    }

    fn memory_lines(&self, status: &VmStatus, columns: u16) -> Vec<Line<'static>> {
        let memory = &status.memory;
        let rate = |of: fn(&Rates) -> f64| {
            let rates = self.rates.as_ref();
            rates.map_or("-".to_owned(), |rates| count(of(rates)))
        };
        let used = self.rates.as_ref().and_then(|rates| rates.ahead_used);
        let used = used.map_or(String::new(), |used| {
            format!(", {} of them used", percent(used))
        });
        let copies = memory.replicas.as_ref();
        let copies = copies.map_or(String::new(), |replicas| match replicas.degraded_bytes {
            0 => match &replicas.stripes {
                Some(stripes) => format!("; stripes of {stripes}"),
                None => "; two copies".to_owned(),
            },
            bytes => format!("; degraded: {}", size(bytes)),
        });
        let drain = memory.drain.as_ref();
        let drain = drain.filter(|drain| drain.state == DrainState::Moving);
        let drain = drain.map_or(String::new(), |drain| {
            let left = size(drain.bytes.saturating_sub(drain.moved_bytes));
            format!("; {left} leave node {}", drain.node)
        });
        let moves = memory.rebalance.as_ref();
        let moves = moves.filter(|moves| moves.state == RebalanceState::Moving);
        let moves = moves.map_or(String::new(), |moves| {
            let left = size(moves.bytes.saturating_sub(moves.moved_bytes));
            format!("; {left} to move")
        });
        vec![
            Line::from(format!(
                "memory     cache {} of {}; {} at home here; {} resident",
                size(memory.cached_bytes),
                size(memory.cache_bytes),
                size(memory.home_here_bytes),
                size(memory.resident_bytes),
            )),
            Line::from(format!(
                "evictions  {}/s; {}/s cancelled; {}/s faults wait for memory",
                rate(|r| r.evictions),
                rate(|r| r.cancelled),
                rate(|r| r.stalled),
            )),
            Line::from(format!(
                "ahead      {}/s pages fetched{used}{copies}{drain}{moves}",
                rate(|r| r.ahead)
            )),
            self.error_line(status, columns),
        ]
    }

    pub(super) fn error_line(&self, status: &VmStatus, columns: u16) -> Line<'static> {
        match status.errors.last() {
            None => Line::from("errors     none"),
            Some(newest) => {
                let text = format!("errors     {}; {newest}", status.errors_total);
                Line::styled(shortened(text, columns), self.style(Color::Red))
            }
        }
    }

    /// Returns a line for each node, below a heading.
    fn node_lines(&self, status: &VmStatus, columns: u16) -> Vec<Line<'static>> {
        let wide = columns >= WIDE;
        let heading = node_columns(
            ["node", "memory", "here", "from", "to", "page", "tier", "by"],
            wide.then_some(["round trip", "outages", "address"]),
        );
        let underlined = Style::new().add_modifier(Modifier::UNDERLINED);
        let mut lines = vec![Line::styled(heading, underlined)];
        for (index, now) in status.nodes.iter().enumerate() {
            let rates = self.rates.as_ref().and_then(|rates| rates.nodes.get(index));
            let here = self
                .heat
                .as_ref()
                .and_then(|heat| heat::part_here(heat, now.node.id));
            let text = shortened(node_text(now, rates, here, wide), columns);
            let away = now.link.is_some_and(|link| !link.reachable);
            let style = if away {
                self.style(Color::Red)
            } else {
                Style::new()
            };
            lines.push(Line::styled(text, style));
        }
        lines
    }
}

fn node_text(now: &NodeNow, rates: Option<&NodeRates>, here: Option<f64>, wide: bool) -> String {
    let node = &now.node;
    let dash = || "-".to_owned();
    let id = if node.id == 0 {
        "0 here".to_owned()
    } else {
        node.id.to_string()
    };
    let rate = |of: fn(&NodeRates) -> f64| match rates.filter(|_| node.id > 0) {
        Some(rates) => pages_a_second(of(rates)),
        None => dash(),
    };
    let path = node.path.as_ref();
    let (page, tier) = match (now.link, path) {
        (Some(link), _) if !link.reachable => (dash(), "away".to_owned()),
        (_, Some(path)) => (time(path.latency_estimate_us), path.tier.clone()),
        _ => (dash(), dash()),
    };
    let by = match (now.link, path) {
        (Some(link), _) if link.rdma => "rdma".to_owned(),
        // RDMA at the start but not now: shows its fallback.
        (Some(_), Some(path)) if path.faults == "rdma" => "tcp".to_owned(),
        (_, Some(path)) if !path.faults.is_empty() => path.faults.clone(),
        _ => dash(),
    };
    let values = [
        id,
        size(node.memory_bytes),
        here.map_or_else(dash, percent),
        rate(|rates| rates.fetched),
        rate(|rates| rates.written_back),
        page,
        tier,
        by,
    ];
    let link = now.link;
    let more = wide.then(|| {
        [
            link.map_or_else(dash, |link| time(link.round_trip_us)),
            link.map_or_else(dash, |link| number(link.outages)),
            node.address.clone().unwrap_or_else(dash),
        ]
    });
    node_columns(values, more)
}

/// Formats a line of the table of nodes: 79 columns, or in the wide form 102 and an address.
fn node_columns<T: AsRef<str>>(values: [T; 8], more: Option<[T; 3]>) -> String {
    let [id, memory, here, from, to, page, tier, by] = values.each_ref().map(AsRef::as_ref);
    let line =
        format!("{id:<6} {memory:>10} {here:>5} {from:>13} {to:>13} {page:>9} {tier:>8} {by:>8}");
    match more.as_ref().map(|more| more.each_ref().map(AsRef::as_ref)) {
        Some([trip, outages, address]) => format!("{line} {trip:>10} {outages:>8}  {address}"),
        None => line,
    }
}

fn fault(name: &str, rate: Option<f64>, kind: &FaultKind) -> Line<'static> {
    let rate = rate.map_or("-".to_owned(), count);
    let times = percentiles(&kind.latency_us);
    Line::from(columns(name, &rate, &number(kind.count), times))
}

fn percentiles(times: &Percentiles) -> [String; 4] {
    [times.p50, times.p90, times.p99, times.max].map(time)
}

/// Formats a line of the table of faults: 76 columns.
fn columns<T: AsRef<str>>(name: &str, rate: &str, count: &str, times: [T; 4]) -> String {
    let [p50, p90, p99, max] = times.each_ref().map(AsRef::as_ref);
    format!("{name:<12} {rate:>9} {count:>9} {p50:>10} {p90:>10} {p99:>10} {max:>10}")
}

/// Drops lines without room, and says so.
fn fitting(mut lines: Vec<Line<'static>>, rows: u16) -> Vec<Line<'static>> {
    let rows = usize::from(rows);
    if lines.len() > rows && rows > 1 {
        let left_out = lines.len() - (rows - 1);
        lines.truncate(rows - 1);
        lines.push(Line::from(format!(
            "and {left_out} more; `ssi-hv status` has all"
        )));
    }
    lines
}

/// Shortens a text, and marks where it was cut.
pub(super) fn shortened(text: String, columns: u16) -> String {
    let columns = usize::from(columns);
    if text.chars().count() <= columns {
        return text;
    }
    let kept: String = text.chars().take(columns.saturating_sub(3)).collect();
    kept + "..."
}
