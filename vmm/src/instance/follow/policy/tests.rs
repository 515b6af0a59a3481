use proptest::prelude::*;

use super::*;

/// vCPUs on nodes that report, and move as the policy says.
struct World {
    policy: Policy,
    owners: Vec<u8>,
    /// The vCPUs that have nothing to do.
    idle: Vec<u8>,
    /// By vCPU and node that it is on: nanoseconds by the node that sent the pages.
    sums: BTreeMap<(usize, u8), Vec<u64>>,
    now: Instant,
}

impl World {
    fn new(room: &[usize], owners: &[u8]) -> Self {
        Self {
            policy: Policy::new(room.to_vec()),
            owners: owners.to_vec(),
            idle: Vec::new(),
            sums: BTreeMap::new(),
            now: Instant::now(),
        }
    }

    fn sightings(&self) -> Vec<Sighting> {
        let owners = (0..).zip(&self.owners);
        let sightings = owners.map(|(cpu, node)| Sighting {
            cpu,
            node: *node,
            waited_for: self.sums.get(&(usize::from(cpu), *node)).cloned(),
            is_idle: self.idle.contains(&cpu),
        });
        sightings.collect()
    }

    /// A second in which each vCPU waits for each node for so many milliseconds.
    fn second(&mut self, waited: &[Vec<u64>]) -> Option<Found> {
        self.now += Duration::from_secs(1);
        for (cpu, waited) in waited.iter().enumerate() {
            let key = (cpu, self.owners[cpu]);
            let sums = self.sums.entry(key).or_insert_with(|| vec![7; 4]);
            for (sum, more) in sums.iter_mut().zip(waited) {
                *sum += *more * 1_000_000;
            }
        }
        let found = self.policy.look(self.now, &self.sightings());
        for (cpu, to) in found.iter().flat_map(Found::steps) {
            self.owners[usize::from(cpu)] = to;
        }
        found
    }
}

#[test]
fn a_vcpu_moves_to_the_node_whose_pages_it_waits_for() {
    let mut world = World::new(&[2, 1], &[0, 1]);
    let came = [vec![0, 0], vec![100, 0]];
    for _ in 0..5 {
        assert_eq!(world.second(&came), None, "a whole window is needed");
    }
    let found = world.second(&came);
    let expected = Found {
        cpu: 1,
        to: 0,
        waited: Duration::from_millis(500),
        from: 1,
        instead: None,
    };
    assert_eq!(found, Some(expected));
}

#[test]
fn one_of_two_vcpus_that_take_pages_from_each_other_moves() {
    let mut world = World::new(&[2, 2], &[0, 1]);
    let mut moves = Vec::new();
    for _ in 0..60 {
        let apart = world.owners[0] != world.owners[1];
        let waited = if apart { 400 } else { 0 };
        let came = [vec![0, waited], vec![waited, 0]];
        moves.extend(world.second(&came));
    }
    assert_eq!(moves.len(), 1, "{moves:?}");
}

#[test]
fn short_waits_or_those_for_several_nodes_move_nothing() {
    for came in [vec![99, 0, 0], vec![300, 0, 200], vec![0, 900, 0]] {
        let mut world = World::new(&[9, 9, 9], &[0, 1]);
        for _ in 0..20 {
            assert_eq!(
                world.second(&[vec![0, 0, 0], came.clone()]),
                None,
                "{came:?}"
            );
        }
    }
}

#[test]
fn sums_that_go_back_or_are_huge_move_nothing_by_themselves() {
    let mut policy = Policy::new(vec![9, 9]);
    let start = Instant::now();
    let mut look = |second, sum| {
        let one = Sighting {
            cpu: 1,
            node: 1,
            waited_for: Some(vec![sum]),
            is_idle: false,
        };
        policy.look(start + Duration::from_secs(second), &[one])
    };
    for (second, sum) in (0..20).zip([u64::MAX, 0].into_iter().cycle()) {
        let found = look(second, sum);
        assert!(
            found.is_none_or(|found| found.to == 0 && second >= 5),
            "{found:?}"
        );
    }
}

#[test]
fn a_vcpu_without_reports_and_a_node_without_room_stay() {
    let mut world = World::new(&[1, 1], &[0, 1]);
    for _ in 0..20 {
        assert_eq!(world.second(&[vec![0, 0], vec![900, 0]]), None, "no room");
    }
    let mut policy = Policy::new(vec![9, 9]);
    for _ in 0..20 {
        let waited_for = None;
        let (cpu, node) = (1, 1);
        let one = Sighting {
            cpu,
            node,
            waited_for,
            is_idle: false,
        };
        assert_eq!(policy.look(Instant::now(), &[one]), None);
    }
}

#[test]
fn a_vcpu_that_idles_makes_room_for_one_that_waits() {
    let waits = [vec![0, 200], vec![0, 0], vec![200, 0]];
    let mut world = World::new(&[2, 1], &[0, 0, 1]);
    for _ in 0..20 {
        assert_eq!(world.second(&waits), None, "both nodes are full");
    }
    world.idle = vec![1];
    for _ in 0..4 {
        assert_eq!(world.second(&waits), None, "it was busy within the window");
    }
    let found = world.second(&waits).expect("a vCPU idles");
    assert_eq!((found.cpu, found.to, found.instead), (2, 0, Some(1)));
    assert_eq!(world.owners, [0, 1, 0]);
    // Both stay for a while, whatever they wait for.
    for _ in 0..20 {
        assert_eq!(world.second(&[vec![0; 2], vec![300, 0], vec![0; 2]]), None);
    }
    // One that waits itself does not make room, even if it was halted at each look.
    let mut world = World::new(&[1, 1], &[0, 1]);
    world.idle = vec![0, 1];
    for _ in 0..20 {
        assert_eq!(world.second(&[vec![0, 400], vec![400, 0]]), None);
    }
}

#[test]
fn places_are_exchanged_without_more_vcpus_on_a_node_than_it_lends_cpus() {
    for (from, to) in [(0, 1), (1, 0), (1, 2)] {
        let waited = Duration::from_secs(1);
        let (cpu, instead) = (0, Some(1));
        let found = Found {
            cpu,
            to,
            waited,
            from,
            instead,
        };
        let mut owners = [from, to];
        for (cpu, to) in found.steps() {
            let there = owners.iter().filter(|node| **node == to).count();
            assert!(to == 0 || there == 0, "{from} to {to}: {owners:?}");
            owners[usize::from(cpu)] = to;
        }
        assert_eq!(owners, [to, from]);
    }
}

#[test]
fn why_each_vcpu_stays_is_known_after_a_look() {
    // The third node has no room.
    let mut world = World::new(&[2, 3, 1], &[0, 1, 2, 1]);
    let came = [
        vec![0, 99, 0],
        vec![0, 0, 900],
        vec![250, 150, 0],
        vec![0, 0, 0],
    ];
    let reasons = |world: &World| {
        let all = world.policy.reasons(world.now, &world.sightings());
        let reasons = all
            .iter()
            .map(|one| (one.cpu, one.reason, one.waited_ms.round()));
        reasons.collect::<Vec<_>>()
    };
    use StayReason::{Full, Little, Moved, Spread, Watched};
    for _ in 0..5 {
        assert_eq!(world.second(&came), None);
    }
    let seconds = 4.0;
    let expected = [
        (0, Watched, seconds * 99.0),
        (1, Watched, seconds * 900.0),
        (2, Watched, seconds * 400.0),
        (3, Watched, 0.0),
    ];
    assert_eq!(reasons(&world), expected);
    assert_eq!(world.second(&came), None);
    let expected = [
        (0, Little, 495.0),
        (1, Full, 4500.0),
        (2, Spread, 2000.0),
        (3, Little, 0.0),
    ];
    assert_eq!(reasons(&world), expected);
    // One moves, and all are watched again.
    let more = [vec![0, 500, 0], vec![0; 3], vec![0; 3], vec![0; 3]];
    let found = world.second(&more).map(|found| (found.cpu, found.to));
    assert_eq!(found, Some((0, 1)));
    let all = world.policy.reasons(world.now, &world.sightings());
    assert!(all[1..].iter().all(|one| one.reason == Watched), "{all:?}");
    let moved = VcpuStays {
        cpu: 0,
        moves: 1,
        waited_ms: 0.0,
        reason: Moved,
        stays_s: Some(30.0),
    };
    assert_eq!(all[0], moved);
}

proptest! {
    #[test]
    fn moves_are_rare_worth_while_and_where_there_is_room(
        room in prop::collection::vec(1..3_usize, 3),
        seconds in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(0..400_u64, 3), 3),
            50..200,
        ),
        idle in prop::collection::vec(0..3_u8, 0..3),
    ) {
        let mut world = World::new(&room, &[0, 1, 2]);
        world.idle = idle;
        let mut moved: BTreeMap<u8, Vec<Instant>> = BTreeMap::new();
        let mut last_move: Option<usize> = None;
        for (second, came) in seconds.iter().enumerate() {
            let before = world.owners.clone();
            let Some(found) = world.second(came) else { continue };
            prop_assert_ne!(before[usize::from(found.cpu)], found.to);
            let there = world.owners.iter().filter(|node| **node == found.to).count();
            prop_assert!(there <= room[usize::from(found.to)]);
            if let Some(other) = found.instead {
                prop_assert!(world.idle.contains(&other));
                prop_assert_eq!(before[usize::from(other)], found.to);
                moved.entry(other).or_default().push(world.now);
            }
            prop_assert!(found.waited >= WAITED_MIN);
            prop_assert!(last_move.is_none_or(|last| second - last >= WINDOW));
            last_move = Some(second);
            let moves = moved.entry(found.cpu).or_default();
            if let Some(last) = moves.last() {
                let stays = STAYS_MIN * (1 << (moves.len() - 1).min(5));
                prop_assert!(world.now - *last >= stays);
            }
            moves.push(world.now);
        }
    }
}
