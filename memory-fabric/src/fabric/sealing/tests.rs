//! What follows from pages that do not open, and who gets sealed pages.

mod copies;

use super::*;
use crate::fabric::{Redundancy, replicas};
use crate::homes::BLOCK_PAGES;
use crate::page::PageRange;
use crate::support::config;
use fabric_replicas::{Copies, Layout, Place, StripePlacement};
use std::sync::Mutex;

/// Donors, and what the judge reports.
struct Court {
    judge: Arc<LinkJudge>,
    set: Option<Arc<ReplicaSet>>,
    events: Arc<Mutex<Vec<FabricEvent>>>,
}

impl Court {
    /// Two or more donors with copies, or one without.
    fn new(copies: Option<Copies>) -> Self {
        let guest = PageRange::new(PageIndex::new(0), BLOCK_PAGES);
        let events = Arc::<Mutex<Vec<FabricEvent>>>::default();
        let of_judge = Arc::clone(&events);
        let observer: FabricObserver =
            Arc::new(move |event| of_judge.lock().expect("no panic").push(event));
        let (nodes, set, observer) = match copies {
            None => (Nodes::new(&[NodeId(1)], &[]), None, observer),
            Some(copies) => {
                let nodes = Nodes::replicated(&[1, 2, 3].map(NodeId), &[]);
                let set = replicas::set(copies, &nodes, &observer);
                let nodes_of_links = Arc::new(nodes.clone());
                let observer = replicas::link_observer(&set, &nodes_of_links, &observer);
                (nodes, Some(set), observer)
            }
        };
        let judge = Arc::new(LinkJudge {
            link: nodes.links() - 1,
            homes: Arc::new(HomeTable::new(NodeId(0), &[guest], None)),
            nodes: Arc::new(nodes),
            replicas: set.clone(),
            observer,
            notices: Seldom::notices(),
        });
        Self { judge, set, events }
    }

    /// Two copies of one block, at the first two donors.
    fn of_copies() -> Self {
        let places = [0, 1].map(|donor| Place { donor, slot: 0 });
        Self::new(Some(Copies::new(
            &[places],
            &[1; 3],
            &[1, 1, 0],
            &[0, 1, 2],
        )))
    }

    fn verdict(&self, donor: Option<usize>, offset: u64, is_ahead: bool) -> Verdict {
        self.judge.judge(Fault::NotGenuine {
            donor,
            offset,
            is_ahead,
        })
    }

    fn has_events(&self) -> bool {
        !self.events.lock().expect("no panic").is_empty()
    }

    /// Takes why the VM ends.
    fn reason(&self) -> String {
        let event = self.events.lock().expect("no panic").pop();
        match event {
            Some(FabricEvent::Failed(reason)) => reason,
            Some(FabricEvent::Link(LinkEvent::Lost { reason, .. })) => reason,
            other => panic!("unexpected {other:?}"),
        }
    }
}

#[test]
fn a_page_that_is_lost_ends_the_vm_when_it_is_used_and_not_when_it_is_read_ahead() {
    let layout: Layout = "2+1".parse().expect("a layout");
    let placement = StripePlacement::new(&[1; 3], layout, 1);
    let striped = Copies::striped(&placement.places, layout, &[1; 3], &placement.used);
    let one_left = Court::of_copies();
    let set = one_left.set.as_ref().expect("copies");
    assert!(!set.down(0, "cut"));
    one_left.events.lock().expect("no panic").clear();
    for (court, donor, reason) in [
        (Court::new(Some(striped)), Some(1), "cannot be computed"),
        (Court::new(None), None, "was received twice"),
        (one_left, Some(1), "was received twice"),
    ] {
        assert_eq!(court.verdict(donor, 0, true), Verdict::Later, "{reason}");
        assert!(!court.has_events(), "{reason}");
        assert_eq!(court.verdict(donor, 0, false), Verdict::Lost, "{reason}");
        let found = court.reason();
        assert!(found.contains(reason), "{found}");
        let verdict = court.judge.judge(Fault::NeverGenuine { donor, offset: 0 });
        assert_eq!(verdict, Verdict::Lost);
        let found = court.reason();
        assert!(found.contains("128 attempts"), "{found}");
        assert!(!court.has_events());
    }
}

#[test]
fn a_donor_with_a_wrong_copy_goes_out_also_when_that_is_read_ahead() {
    let court = Court::of_copies();
    assert_eq!(court.verdict(Some(0), 0, true), Verdict::ReadAgain);
    let set = court.set.as_ref().expect("copies");
    assert!(set.copies().is_out(0) && !set.copies().is_out(1));
    let events = court.events.lock().expect("no panic");
    assert!(
        matches!(events[..], [FabricEvent::Degraded { .. }]),
        "{events:?}"
    );
}

#[test]
fn donors_on_other_hosts_get_sealed_pages_unless_told_otherwise() {
    let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
    let (near, far) = (address("127.0.0.1:7000"), address("10.0.0.2:7000"));
    let mapped = address("[::ffff:127.0.0.1]:7000");
    let mut config = config(1 << 24, 1 << 23, &[near, far]);
    for (seal, wanted) in [
        (Sealing::Auto, [false, false, true, false]),
        (Sealing::On, [true; 4]),
        (Sealing::Off, [false; 4]),
    ] {
        config.seal = seal;
        let found = [Some(near), Some(mapped), Some(far), None].map(|at| config.seals(at));
        assert_eq!(found, wanted, "{seal:?}");
    }
    config.seal = Sealing::Auto;
    config.redundancy = Redundancy::Copies;
    assert!(config.seals(Some(near)), "a copy is at the other donor");
    assert!(!config.leaves_unsealed(far));
    config.donors.retain(|donor| donor.address == near);
    assert!(config.leaves_unsealed(far) && !config.leaves_unsealed(mapped));
    config.seal = Sealing::Off;
    assert!(!config.leaves_unsealed(far), "that is asked for");
}
