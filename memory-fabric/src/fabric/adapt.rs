//! Following how fast links are while the VM runs: from the fetches that faults wait for where
//! there are some, and by a few requests of its own where a link is idle.

use crate::homes::NodeId;
use crate::link::path::PathStats;
use crate::link::rdma::{RdmaLinkConfig, RdmaStats};
use crate::link::{LinkStats, describe, probe};
use crate::nodes::Nodes;
use crate::pager::Policies;
use crate::policy::{Steady, Tier};
use crate::stats::{DonorStats, PagerStats, Recent};
use crate::transport::PathKind;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use fabric_host::{ThreadClass, begin_class};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often links are looked at.
const INTERVAL: Duration = Duration::from_secs(1);
/// With fewer fetches than this, more are waited for.
const FETCHES_MIN: u64 = 16;
/// A link on which nothing went for so long is tried; doubled each time, as long as nothing does.
const IDLE_MIN: Duration = Duration::from_secs(2);
/// The longest such time.
const IDLE_MAX: Duration = Duration::from_secs(32);
/// How long such a try may take.
const TRY_TIME: Duration = Duration::from_millis(20);
/// Longest wait for the end of the thread: one that hangs in a verb is detached.
const END_TIME_MAX: Duration = Duration::from_secs(2);

/// The thread that follows the links. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Adapter {
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl Adapter {
    /// Follows the links of these donors, and of those that come by `changes`.
    pub(super) fn start(
        donors: Vec<Followed>,
        changes: Receiver<Change>,
        stats: Arc<PagerStats>,
        policies: Arc<Policies>,
        nodes: Arc<Nodes>,
    ) -> io::Result<Self> {
        let (stop, stopped) = bounded(0);
        let (ended_by, ended) = bounded(1);
        std::thread::Builder::new()
            .name("pager-adapt".to_owned())
            .spawn(move || {
                begin_class(ThreadClass::Link);
                follow(donors, &changes, &stats, &policies, &nodes, &stopped);
                let _ = ended_by.send(());
            })?;
        let stop = Some(stop);
        Ok(Self { stop, ended })
    }
}

impl Drop for Adapter {
    fn drop(&mut self) {
        self.stop = None;
        if self.ended.recv_timeout(END_TIME_MAX) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the thread that measures links does not end; it is left behind");
        }
    }
}

/// A donor that joins, or leaves.
#[derive(Debug)]
pub(super) enum Change {
    Follow(Box<Followed>),
    Forget(NodeId),
}

/// A donor whose link is followed.
#[derive(Debug)]
pub(super) struct Followed {
    /// Where it is, and with which token.
    config: RdmaLinkConfig,
    link: Arc<LinkStats>,
    rdma: Option<Arc<RdmaStats>>,
    path: Arc<PathStats>,
    steady: Steady,
    fetches: Recent,
    /// Pages of all kinds that went to and fro when it was looked at last.
    pages: u64,
    /// Since when nothing has.
    idle_since: Instant,
    idle_time: Duration,
}

impl Followed {
    pub(super) fn new(
        config: RdmaLinkConfig,
        link: Arc<LinkStats>,
        rdma: Option<Arc<RdmaStats>>,
        path: Arc<PathStats>,
    ) -> Self {
        Self {
            steady: Steady::new(path.tier()),
            fetches: Recent::default(),
            pages: 0,
            idle_since: Instant::now(),
            idle_time: IDLE_MIN,
            config,
            link,
            rdma,
            path,
        }
    }

    /// What faults go by now.
    fn kind(&self) -> PathKind {
        match self.rdma.as_deref() {
            Some(rdma) if rdma.is_connected() => PathKind::Rdma,
            _ => self.config.carrier.kind(),
        }
    }

    /// What a fetch takes now, if there is something new to say.
    fn latency(&mut self, stats: &DonorStats) -> Option<Duration> {
        let pages = stats.pages_fetched.get() + stats.pages_written_back.get();
        if pages != self.pages {
            self.pages = pages;
            self.idle_since = Instant::now();
            self.idle_time = IDLE_MIN;
        }
        if let Some(quarter) = self.fetches.quarter(&stats.fetch, FETCHES_MIN) {
            return Some(quarter);
        }
        if self.idle_since.elapsed() < self.idle_time || !self.link.is_reachable() {
            return None;
        }
        self.idle_since = Instant::now();
        self.idle_time = (self.idle_time * 2).min(IDLE_MAX);
        self.try_it()
            .inspect_err(|why| tracing::debug!(node = %self.config.ends.donor, why, "not measured"))
            .ok()
    }

    /// Asks for some pages on a connection for that alone.
    fn try_it(&self) -> Result<Duration, String> {
        let gauge = if self.kind() == PathKind::Rdma {
            probe::rdma(&self.config).map_err(|error| describe(&error))
        } else {
            probe::stream(&self.config).map_err(|error| describe(&error))
        };
        let time = gauge?.page_round_trip(TRY_TIME);
        time.map_err(|error| error.to_string())
    }
}

fn follow(
    mut donors: Vec<Followed>,
    changes: &Receiver<Change>,
    stats: &PagerStats,
    policies: &Policies,
    nodes: &Nodes,
    stopped: &Receiver<()>,
) {
    // Its end is the end of the other end.
    while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
        for change in changes.try_iter() {
            match change {
                Change::Follow(donor) => donors.push(*donor),
                Change::Forget(node) => donors.retain(|donor| donor.config.ends.donor != node),
            }
        }
        for donor in &mut donors {
            let link = nodes.link_to(donor.config.ends.donor);
            let Some(stats) = link.and_then(|link| stats.donors.get(link)) else {
                continue;
            };
            let Some(latency) = donor.latency(stats) else {
                continue;
            };
            let kind = donor.kind();
            let before = donor.path.tier();
            let (path, steady) = (&donor.path, &mut donor.steady);
            if let Some(tier) = take_in(path, steady, kind, latency, policies) {
                let node: NodeId = donor.config.ends.donor;
                tracing::info!(
                    "the link to {node} is {} now, it was {}: a page takes {} us",
                    tier.name(),
                    before.name(),
                    latency.as_micros()
                );
            }
        }
    }
}

/// Takes in what a fetch by this path takes now. Gives the path's tier when it is another one from
/// now on, which then decides what the pager does.
fn take_in(
    path: &PathStats,
    steady: &mut Steady,
    kind: PathKind,
    latency: Duration,
    policies: &Policies,
) -> Option<Tier> {
    path.set_latency(latency);
    let tier = steady.observe(kind, latency)?;
    path.set_tier(tier);
    policies.renew();
    Some(tier)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;
    use crate::transport::select::Selection;

    #[test]
    fn what_the_pager_does_follows_a_link_whose_speed_changes() {
        let (fast, slow) = (Duration::from_micros(50), Duration::from_millis(10));
        let kind = PathKind::Tcp;
        let path = PathStats::new(Selection::all(kind), (kind, None), None, fast);
        let path = Arc::new(path);
        let policies = Policies::new(vec![Arc::clone(&path)], 1, 0);
        let mut steady = Steady::new(path.tier());
        assert_ne!(Policy::of(Tier::FastTcp), Policy::of(Tier::Slow));
        for (latency, tier) in [(slow, Tier::Slow), (fast, Tier::FastTcp)] {
            let before = policies.all();
            let mut found = None;
            for _ in 0..10 {
                found = take_in(&path, &mut steady, kind, latency, &policies);
                if found.is_some() {
                    break;
                }
                assert_eq!(policies.all(), before, "once is not lasting");
            }
            assert_eq!(found, Some(tier));
            assert_eq!(policies.all(), Policy::of(tier));
            assert_eq!(policies.of(0), Policy::of(tier));
        }
    }
}
