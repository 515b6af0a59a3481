//! Pages that a node keeps at a donor, fetched by that node and by another one.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail, ensure};
use fabric_coherence::Member;
use fabric_sharing::Homes;
use memory_fabric::BLOCK_BYTES;
use memory_fabric::donor::server::Donor;
use memory_fabric::page::PAGE_SIZE;

use super::floor::SAMPLES;
use super::nodes::{Carrier, Nodes, Shared};
use super::protocol::{Answer, Command, Counters, Exchange, Pages, UsedDonor};
use super::{BLOCK, Transaction, compared, histogram, times};
use crate::commands::bench::{ROUNDS, Series, fault};

/// Blocks that node 0 lends. It keeps as many of those whose home it is, the first ones, and their pages
/// leave it no more room than for copies.
const LOCAL_BLOCKS: u64 = 4;
/// Blocks that each other node lends.
const OTHERS_BLOCKS: u64 = 2;
/// Blocks that the donor lends, in which a round reads two; the last of them are what node 0 has copies
/// of at first.
const LENT_BLOCKS: u64 = 2 * ROUNDS as u64 + 4;

/// The nodes, and what was measured.
pub(super) struct AtDonor {
    nodes: Nodes,
    // Ends after the nodes, which use it.
    donor: Donor,
    /// Where node 1 is helped with bare exchanges.
    far: SocketAddr,
    /// Blocks that are at the donor.
    blocks: Vec<usize>,
    /// By the node that fetches: pages, and bare exchanges.
    series: [(Series, Series); 2],
    pub(super) verified_bytes: u64,
    pub(super) corrupt_bytes: u64,
}

impl AtDonor {
    /// Starts a donor in this process, and nodes of which the first one uses it. Fills its pages.
    pub(super) fn start(nodes: u8, carrier: Carrier) -> Result<Self> {
        // The floors lease a page each.
        let donor = Donor::start(&fault::donor((LENT_BLOCKS + 1) * BLOCK_BYTES))?;
        let mut lent = vec![OTHERS_BLOCKS; nodes.into()];
        lent[0] = LOCAL_BLOCKS + LENT_BLOCKS;
        let blocks = usize::try_from(lent.iter().sum::<u64>())?;
        let homes = Homes::in_proportion(&lent, std::slice::from_ref(&(0..blocks)))?;
        let first = Member::at(0).context("no first node")?;
        let of_first: Vec<usize> = homes.blocks_at(first).collect();
        let shared = Shared {
            blocks: u32::try_from(blocks)?,
            lent_bytes: lent.iter().map(|blocks| blocks * BLOCK_BYTES).collect(),
            carrier,
            donor: Some(UsedDonor {
                address: donor.address(),
                lent_bytes: LENT_BLOCKS * BLOCK_BYTES,
                local_bytes: LOCAL_BLOCKS * BLOCK_BYTES,
            }),
        };
        let mut nodes = Nodes::start(&shared)?;
        for block in &of_first {
            nodes.ask(0, &Command::Fill(pages(*block, 0, BLOCK)))?;
        }
        let at_donor = of_first.into_iter().skip(usize::try_from(LOCAL_BLOCKS)?);
        let address = donor.address();
        let Answer::Listening(far) = nodes.ask(0, &Command::FloorServe(Some(address)))? else {
            bail!("node 0 serves no floor");
        };
        Ok(Self {
            nodes,
            donor,
            far,
            blocks: at_donor.collect(),
            series: Default::default(),
            verified_bytes: 0,
            corrupt_bytes: 0,
        })
    }

    /// Measures pages that no other round measures.
    pub(super) fn round(&mut self, round: usize) -> Result<()> {
        let (donor, home) = (self.donor.address(), self.far);
        let floors = [(donor, Exchange::Fetch), (home, Exchange::Relay)];
        for (node, (far, what)) in floors.into_iter().enumerate() {
            let floor = self.nodes.ask(node, &Command::Floor { far, what })?;
            self.series[node].1.add(&times(floor)?);
            let block = self.blocks.get(2 * round + node);
            let block = *block.context("too few blocks at the donor")?;
            // The block of node 0 is split when another node uses it.
            self.compare(node, pages(block, SAMPLES, BLOCK - SAMPLES))?;
            let before = self.fetched()?;
            let times = self.compare(node, pages(block, 0, SAMPLES))?;
            self.series[node].0.add(&histogram(times));
            let came = self.fetched()? - before;
            ensure!(
                came == SAMPLES as u64,
                "{came} of {SAMPLES} pages that node {node} read came from the donor"
            );
        }
        Ok(())
    }

    /// Has a node read pages. Returns the time of each access.
    fn compare(&mut self, node: usize, pages: Pages) -> Result<Vec<u64>> {
        let answer = self.nodes.ask(node, &Command::Compare(pages))?;
        let Answer::Compared {
            times,
            corrupt_bytes,
        } = answer
        else {
            bail!("node {node} compared nothing: {answer:?}");
        };
        self.verified_bytes += (pages.count * PAGE_SIZE) as u64;
        self.corrupt_bytes += corrupt_bytes;
        Ok(times)
    }

    /// Pages that came from the donor so far.
    fn fetched(&mut self) -> Result<u64> {
        match self.nodes.ask(0, &Command::Stats)? {
            Answer::Stats(Counters { from_depot, .. }) => Ok(from_depot),
            other => bail!("node 0 has no counters: {other:?}"),
        }
    }

    /// What each node's fetches took.
    pub(super) fn transactions(&self) -> Vec<Transaction> {
        let names = ["from its home, node 0", "from node 1, by its home"];
        let series = names.into_iter().zip(&self.series);
        series
            .map(|(name, series)| compared(name, series))
            .collect()
    }
}

fn pages(block: usize, first: usize, count: usize) -> Pages {
    Pages {
        first: block * BLOCK + first,
        step: 1,
        count,
    }
}
