use proptest::prelude::*;

use super::*;

/// vCPUs on nodes that report, and move as the policy says.
struct World {
    policy: Policy,
    owners: Vec<u8>,
    /// By vCPU and node that it is on: the pages by the node that sent them.
    counts: BTreeMap<(usize, u8), Vec<u32>>,
    now: Instant,
}

impl World {
    fn new(room: &[usize], owners: &[u8]) -> Self {
        Self {
            policy: Policy::new(room.to_vec()),
            owners: owners.to_vec(),
            counts: BTreeMap::new(),
            now: Instant::now(),
        }
    }

    fn sightings(&self) -> Vec<Sighting> {
        let owners = (0..).zip(&self.owners);
        let sightings = owners.map(|(cpu, node)| Sighting {
            cpu,
            node: *node,
            came_from: self.counts.get(&(usize::from(cpu), *node)).cloned(),
        });
        sightings.collect()
    }

    /// A second in which each vCPU waits for so many pages from each node.
    fn second(&mut self, came: &[Vec<u32>]) -> Option<Found> {
        self.now += Duration::from_secs(1);
        for (cpu, came) in came.iter().enumerate() {
            let key = (cpu, self.owners[cpu]);
            let counts = self
                .counts
                .entry(key)
                .or_insert_with(|| vec![u32::MAX - 100; 4]);
            for (count, more) in counts.iter_mut().zip(came) {
                *count = count.wrapping_add(*more);
            }
        }
        let found = self.policy.look(self.now, &self.sightings());
        if let Some(found) = found {
            self.owners[usize::from(found.cpu)] = found.to;
        }
        found
    }
}

#[test]
fn a_vcpu_moves_to_the_node_from_which_its_pages_come() {
    let mut world = World::new(&[2, 1], &[0, 1]);
    let came = [vec![0, 0], vec![60, 0]];
    for _ in 0..5 {
        assert_eq!(world.second(&came), None, "a whole window is needed");
    }
    let found = world.second(&came);
    let expected = Found {
        cpu: 1,
        to: 0,
        pages: 300,
    };
    assert_eq!(found, Some(expected));
}

#[test]
fn one_of_two_vcpus_that_take_pages_from_each_other_moves() {
    let mut world = World::new(&[2, 2], &[0, 1]);
    let mut moves = Vec::new();
    for _ in 0..60 {
        let apart = world.owners[0] != world.owners[1];
        let pages = if apart { 500 } else { 0 };
        let came = [vec![0, pages], vec![pages, 0]];
        moves.extend(world.second(&came));
    }
    assert_eq!(moves.len(), 1, "{moves:?}");
}

#[test]
fn few_pages_or_those_of_several_nodes_move_nothing() {
    for came in [vec![19, 0, 0], vec![300, 0, 200], vec![0, 900, 0]] {
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
fn a_vcpu_without_reports_and_a_node_without_room_stay() {
    let mut world = World::new(&[1, 1], &[0, 1]);
    for _ in 0..20 {
        assert_eq!(world.second(&[vec![0, 0], vec![900, 0]]), None, "no room");
    }
    let mut policy = Policy::new(vec![9, 9]);
    for _ in 0..20 {
        let came_from = None;
        let (cpu, node) = (1, 1);
        let one = Sighting {
            cpu,
            node,
            came_from,
        };
        assert_eq!(policy.look(Instant::now(), &[one]), None);
    }
}

#[test]
fn why_each_vcpu_stays_is_known_after_a_look() {
    // The third node has no room.
    let mut world = World::new(&[2, 3, 1], &[0, 1, 2, 1]);
    let came = [
        vec![0, 19, 0],
        vec![0, 0, 900],
        vec![30, 20, 0],
        vec![0, 0, 0],
    ];
    let reasons = |world: &World| {
        let all = world.policy.reasons(world.now, &world.sightings());
        let reasons = all.iter().map(|one| (one.cpu, one.reason, one.pages));
        reasons.collect::<Vec<_>>()
    };
    use StayReason::{Few, Full, Moved, Spread, Watched};
    for _ in 0..5 {
        assert_eq!(world.second(&came), None);
    }
    let seconds = 4;
    let expected = [
        (0, Watched, seconds * 19),
        (1, Watched, seconds * 900),
        (2, Watched, seconds * 50),
        (3, Watched, 0),
    ];
    assert_eq!(reasons(&world), expected);
    assert_eq!(world.second(&came), None);
    let expected = [(0, Few, 95), (1, Full, 4500), (2, Spread, 250), (3, Few, 0)];
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
        pages: 0,
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
            prop::collection::vec(prop::collection::vec(0..400_u32, 3), 3),
            50..200,
        ),
    ) {
        let mut world = World::new(&room, &[0, 1, 2]);
        let mut moved: BTreeMap<u8, Vec<Instant>> = BTreeMap::new();
        let mut last_move: Option<usize> = None;
        for (second, came) in seconds.iter().enumerate() {
            let before = world.owners.clone();
            let Some(found) = world.second(came) else { continue };
            prop_assert_ne!(before[usize::from(found.cpu)], found.to);
            let there = world.owners.iter().filter(|node| **node == found.to).count();
            prop_assert!(there <= room[usize::from(found.to)]);
            prop_assert!(found.pages >= PAGES_MIN);
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
