//! The numbers of a VM whose vCPUs are on several nodes.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::View;
use super::format::{count, time};
use super::rates::NodeRates;
use super::screen::shortened;
use crate::report::{Coherence, Role};
use crate::status::screen::shared::{
    clocks, hottest, paths, policy, round_trip, state_of, totals, vcpus, work,
};
use crate::status::{NodeNow, VmStatus};

/// Rows of the rate and its history.
const RATE_ROWS: u16 = 3;
/// Most rows of the list of pairs of nodes.
const PATH_ROWS_MAX: usize = 2;
/// Most rows of the list of clocks.
const CLOCK_ROWS_MAX: usize = 2;
/// Most rows of what moves vCPUs.
const POLICY_ROWS_MAX: usize = 1;
/// Most rows of the list of vCPUs.
const VCPU_ROWS_MAX: usize = 4;

impl View {
    /// Draws rates, nodes, sums, vCPUs and as many hot pages as there is room for.
    pub(super) fn draw_shared(
        &self,
        status: &VmStatus,
        coherence: &Coherence,
        frame: &mut Frame<'_>,
        area: Rect,
    ) {
        let [rate, rest] =
            Layout::vertical([Constraint::Length(RATE_ROWS), Constraint::Min(0)]).areas(area);
        self.draw_rate(frame, rate);
        let mut lines = self.compute_lines(status, rest.width);
        let plain = |text: String| Line::from(shortened(text, rest.width));
        let mut of_paths = paths(status, rest.width.into());
        of_paths.truncate(PATH_ROWS_MAX);
        lines.extend(of_paths.into_iter().map(plain));
        let mut of_clocks = clocks(&status.nodes, rest.width.into());
        of_clocks.truncate(CLOCK_ROWS_MAX);
        lines.extend(of_clocks.into_iter().map(plain));
        lines.extend(totals(coherence).into_iter().map(plain));
        let mut of_vcpus = vcpus(&status.vcpus, rest.width.into());
        of_vcpus.truncate(VCPU_ROWS_MAX);
        lines.extend(of_vcpus.into_iter().map(plain));
        if let Some(used) = &status.vcpu_policy {
            let mut of_policy = policy(used, rest.width.into());
            of_policy.truncate(POLICY_ROWS_MAX);
            lines.extend(of_policy.into_iter().map(plain));
        }
        lines.push(self.error_line(status, rest.width));
        let left = usize::from(rest.height).saturating_sub(lines.len());
        lines.extend(hottest(coherence, left).into_iter().map(plain));
        frame.render_widget(Paragraph::new(lines), rest);
    }

    fn compute_lines(&self, status: &VmStatus, columns: u16) -> Vec<Line<'static>> {
        let heading = row([
            "node", "vCPUs", "state", "requests", "received", "sent", "early", "trip", "address",
        ]);
        let underlined = Style::new().add_modifier(Modifier::UNDERLINED);
        let mut lines = vec![Line::styled(shortened(heading, columns), underlined)];
        for (index, now) in status.nodes.iter().enumerate() {
            let rates = self.rates.as_ref().and_then(|rates| rates.nodes.get(index));
            let text = shortened(compute(now, rates), columns);
            let style = match state_of(now) {
                "up" => Style::new(),
                "starting" => self.style(Color::Yellow),
                _ => self.style(Color::Red),
            };
            lines.push(Line::styled(text, style));
        }
        lines
    }
}

fn compute(now: &NodeNow, rates: Option<&NodeRates>) -> String {
    let node = &now.node;
    let rate = |of: fn(&NodeRates) -> f64| match rates {
        Some(rates) => format!("{}/s", count(of(rates))),
        None => "-".to_owned(),
    };
    let of_compute = |of: fn(&NodeRates) -> f64| match node.role {
        Role::Donor => "-".to_owned(),
        Role::Compute => rate(of),
    };
    row([
        node.id.to_string(),
        work(now),
        state_of(now).to_owned(),
        of_compute(|rates| rates.requests),
        // A donor receives what is written back to it.
        rate(|rates| rates.received + rates.written_back),
        rate(|rates| rates.sent + rates.fetched),
        of_compute(|rates| rates.early),
        round_trip(now).map_or("-".to_owned(), time),
        node.address.clone().unwrap_or_else(|| "here".to_owned()),
    ])
}

/// Formats a line of the table of nodes: 72 columns and an address.
fn row<T: AsRef<str>>(values: [T; 9]) -> String {
    let [
        id,
        cpus,
        state,
        requests,
        received,
        sent,
        early,
        trip,
        address,
    ] = values.each_ref().map(AsRef::as_ref);
    format!(
        "{id:<4} {cpus:<8} {state:<8} {requests:>10} {received:>9} {sent:>9} {early:>7} {trip:>9}  \
         {address}"
    )
}
