//! CPU time of a request: what all processes use for it, of two nodes and of four.

use anyhow::{Result, ensure};
use serde::Serialize;

use super::floor::SAMPLES;
use super::nodes::{Carrier, Nodes, Shared};
use super::protocol::{Command, Pages};
use super::{BLOCK, counters, times};
use crate::commands::bench::median;

/// Sizes of the sets of nodes that are compared.
const SIZES: [u8; 2] = [2, 4];

/// Who requests.
const NAMES: [&str; 2] = ["one node after the other", "all nodes at once"];

/// CPU time of all nodes for a request for a page that another one has written.
#[derive(Debug, Serialize)]
pub(super) struct Cost {
    pub(super) name: &'static str,
    /// Medians over the rounds.
    pub(super) two_nodes_cpu_us: f64,
    pub(super) four_nodes_cpu_us: f64,
    /// Median over the rounds of that of four nodes divided by that of two.
    pub(super) ratio: f64,
}

/// Nodes that do nothing but this, so that all their CPU time belongs to their requests.
pub(super) struct Costs {
    sets: [Nodes; SIZES.len()],
    /// By name, size and round, in microseconds.
    rounds: [[Vec<f64>; SIZES.len()]; NAMES.len()],
}

impl Costs {
    /// Starts the nodes. Each writes a block, which its neighbour then uses as well: it is split.
    pub(super) fn start(carrier: Carrier) -> Result<Self> {
        let start = |size: u8| -> Result<Nodes> {
            let mut nodes = Nodes::start(&Shared::whole(size, size.into(), carrier)?)?;
            for node in 0..nodes.count() {
                nodes.ask(node, &write(node, 0, BLOCK))?;
            }
            for node in 0..nodes.count() {
                let block = (node + 1) % nodes.count();
                nodes.ask(node, &write(block, SAMPLES, 1))?;
            }
            Ok(nodes)
        };
        let [two, four] = SIZES;
        Ok(Self {
            sets: [start(two)?, start(four)?],
            rounds: Default::default(),
        })
    }

    /// Measures one round, two nodes and four in turns.
    pub(super) fn round(&mut self) -> Result<()> {
        for (at_once, sizes) in self.rounds.iter_mut().enumerate() {
            for (nodes, rounds) in self.sets.iter_mut().zip(sizes) {
                rounds.push(per_request(nodes, at_once == 1)?);
            }
        }
        Ok(())
    }

    /// What was measured.
    pub(super) fn list(self) -> Vec<Cost> {
        let all = NAMES.into_iter().zip(self.rounds);
        let costs = all.map(|(name, [two, four])| {
            let ratios = two.iter().zip(&four).map(|(two, four)| four / two);
            Cost {
                name,
                ratio: median(ratios.collect()),
                two_nodes_cpu_us: median(two),
                four_nodes_cpu_us: median(four),
            }
        });
        costs.collect()
    }
}

/// Writes pages of a block.
fn write(block: usize, first: usize, count: usize) -> Command {
    Command::Touch {
        pages: Pages {
            first: block * BLOCK + first,
            step: 1,
            count,
        },
        write: true,
    }
}

/// Has each node write the pages that its neighbour wrote last, in as many laps as there are nodes:
/// the directory of a block is each of the nodes once. Returns the CPU time of a request.
fn per_request(nodes: &mut Nodes, at_once: bool) -> Result<f64> {
    let count = nodes.count();
    let before = counters(nodes)?;
    for lap in 1..=count {
        let of = |node: usize| write((node + lap) % count, 0, SAMPLES);
        let answers = match at_once {
            true => nodes.each(of)?,
            false => {
                let answers = (0..count).map(|node| nodes.ask(node, &of(node)));
                answers.collect::<Result<_>>()?
            }
        };
        for answer in answers {
            times(answer)?;
        }
    }
    let after = counters(nodes)?;
    let requests = after.requests() - before.requests();
    let pages = (count * count * SAMPLES) as u64;
    ensure!(
        requests >= pages,
        "{count} nodes made {requests} requests for {pages} pages that others have"
    );
    // Counts stay far below 2^52.
    #[allow(clippy::cast_precision_loss)]
    Ok((after.cpu_us - before.cpu_us) as f64 / requests as f64)
}
