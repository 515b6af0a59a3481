//! Homes are assigned, found, and removed.

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

const LOCAL: NodeId = NodeId(3);
/// The first block that can be added.
const FIRST: u32 = 2048;

fn pages(block: u32, count: u32) -> PageRange {
    PageRange::new(PageIndex::new(block * BLOCK_PAGES), count)
}

/// A guest with 4 blocks and a half at the start, and 100 that can be added.
fn table() -> HomeTable {
    let ram = pages(0, 4 * BLOCK_PAGES + BLOCK_PAGES / 2);
    HomeTable::new(LOCAL, &[ram], Some(pages(FIRST, 100 * BLOCK_PAGES)))
}

fn at(node: u8, slot: u32) -> Home {
    Home {
        node: NodeId(node),
        slot,
    }
}

#[test]
fn a_block_has_a_home_from_when_it_is_assigned_until_it_is_unassigned() {
    let table = table();
    let page = PageIndex::new((FIRST + 7) * BLOCK_PAGES + 3);
    let block = HomeTable::block_of(page);
    assert_eq!(table.home_of(page), None);
    assert_eq!(table.eviction_of(page), Eviction::Discard);
    let far = at(255, (1 << SLOT_BITS) - 1);
    table.assign(block, far);
    assert_eq!(table.home_of(page), Some(far));
    let offset = u64::from(far.slot) * BLOCK_BYTES + 3 * 4096;
    assert_eq!(far.offset_of(page), offset);
    assert_eq!(table.eviction_of(page), Eviction::WriteBack(far));
    table.set_leaving(block, true);
    assert_eq!(table.eviction_of(page), Eviction::Discard);
    assert_eq!(table.home_of(page), Some(far), "its pages still have one");
    table.set_leaving(block, false);
    assert_eq!(table.eviction_of(page), Eviction::WriteBack(far));
    assert_eq!(
        (table.added_blocks(), table.added_blocks_at(far.node)),
        (1, 1)
    );
    assert_eq!(table.unassign(block), Some(far));
    assert_eq!(table.unassign(block), None);
    assert_eq!((table.added_blocks(), table.home_of(page)), (0, None));
}

#[test]
fn the_epoch_grows_with_each_change_of_a_home_and_with_nothing_else() {
    let table = table();
    table.assign_at_start(0, at(1, 0));
    assert_eq!(table.local_node().epoch(), 1);
    table.assign(FIRST, at(1, 1));
    assert_eq!(table.local_node().epoch(), 2);
    table.set_leaving(FIRST, true);
    assert_eq!(table.local_node().epoch(), 2);
    table.unassign(FIRST);
    assert_eq!(table.local_node().epoch(), 3);
    table.unassign(FIRST);
    assert_eq!(table.local_node().epoch(), 3, "there was none");
}

#[test]
fn what_is_at_home_here_stays_and_only_added_memory_of_it_is_paged() {
    let table = table();
    table.assign_at_start(0, at(LOCAL.0, 0));
    table.assign_at_start(1, at(1, 0));
    table.assign(FIRST, at(LOCAL.0, 0));
    let page = |block: u32| PageIndex::new(block * BLOCK_PAGES);
    assert_eq!(table.eviction_of(page(0)), Eviction::Keep);
    assert_eq!(table.eviction_of(page(FIRST)), Eviction::Keep);
    assert_eq!(table.remote_home_of(page(0)), None);
    assert_eq!(table.remote_home_of(page(1)), Some(at(1, 0)));
    let paged = [0, 1, FIRST, FIRST + 1].map(|block| table.is_paged(page(block)));
    assert_eq!(paged, [false, true, true, true]);
}

#[test]
fn pages_outside_of_memory_have_no_home() {
    let table = table();
    let end = 4 * BLOCK_PAGES + BLOCK_PAGES / 2;
    for (page, expected) in [
        (end - 1, true),
        (end, false),
        (1000 * BLOCK_PAGES, false),
        (FIRST * BLOCK_PAGES, true),
        ((FIRST + 100) * BLOCK_PAGES, false),
        (u32::MAX, false),
    ] {
        let page = PageIndex::new(page);
        assert_eq!(table.is_guest_memory(page), expected, "{page}");
        assert_eq!(table.home_of(page), None);
    }
    assert_eq!(table.pages_of(4), pages(4, BLOCK_PAGES / 2));
    assert_eq!(table.pages_of(FIRST), pages(FIRST, BLOCK_PAGES));
    assert_eq!(table.pages_of(1000).count, 0);
    assert_eq!(table.ram_span_pages(), end.into());
    assert_eq!(table.span_pages(), u64::from((FIRST + 100) * BLOCK_PAGES));
}

#[test]
fn neighbours_with_one_home_are_one_extent() {
    let table = table();
    for (block, home) in [(0, 1), (1, 1), (2, 0), (5, 1), (99, 2)] {
        table.assign(FIRST + block, at(home, 0));
    }
    for block in 0..5 {
        table.assign_at_start(block, at(1, block));
    }
    let found = |extents: Vec<Extent>| -> Vec<(u8, u32)> {
        let extents = extents.iter();
        extents.map(|e| (e.home.0, e.pages.count)).collect()
    };
    let added = [(1, 2), (0, 1), (1, 1), (2, 1)];
    let added = added.map(|(node, blocks)| (node, blocks * BLOCK_PAGES));
    assert_eq!(found(table.added_extents()), added);
    let all = 4 * BLOCK_PAGES + BLOCK_PAGES / 2;
    assert_eq!(found(table.ram_extents()), [(1, all)]);
    assert_eq!(table.ram_extents_at(NodeId(2)).count(), 0);
    assert_eq!(table.pages_at(NodeId(1)), u64::from(all + 3 * BLOCK_PAGES));
}

#[test]
fn a_run_is_contiguous_as_long_as_node_and_slots_go_on() {
    let table = table();
    for (block, home) in [(0, at(1, 4)), (1, at(1, 5)), (2, at(1, 7)), (3, at(2, 8))] {
        table.assign_at_start(block, home);
    }
    let from = |page: u32, most: u32| {
        let page = PageIndex::new(page);
        let home = table.home_of(page).expect("it has one");
        table.contiguous(page, home, most)
    };
    assert_eq!(from(500, 64), 64);
    assert_eq!(from(500, 10_000), 12 + BLOCK_PAGES);
    assert_eq!(from(BLOCK_PAGES, 10_000), BLOCK_PAGES);
    assert_eq!(from(3 * BLOCK_PAGES - 1, 64), 1);
    assert_eq!(from(4 * BLOCK_PAGES - 5, 64), 5);
    assert_eq!(from(7, 1), 1);
}

#[test]
fn readers_see_a_whole_home_and_no_epoch_from_before_it() {
    let table = table();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..100_000_u32 {
                // Node and slot belong together, and the slot shows when it was assigned.
                table.assign(FIRST, at((round % 200) as u8, round));
                table.unassign(FIRST);
            }
        });
        let mut epoch = 0;
        while epoch < 200_001 {
            let home = table.home(FIRST);
            let now = table.local_node().epoch();
            assert!(now >= epoch);
            epoch = now;
            if let Some(home) = home {
                assert_eq!(u32::from(home.node.0), home.slot % 200);
                assert!(
                    epoch >= 2 + 2 * u64::from(home.slot),
                    "{home:?} in epoch {epoch}"
                );
            }
        }
    });
    assert_eq!(table.added_blocks(), 0);
}

proptest! {
    /// Compares the table with a map, for any nodes and slots.
    #[test]
    fn the_table_is_a_map_from_blocks_to_homes(
        steps in prop::collection::vec(
            (0_u32..5, 0_u32..100, any::<u8>(), 0_u32..1 << SLOT_BITS), 1..80),
    ) {
        let table = table();
        let mut model: HashMap<u32, (Home, bool)> = HashMap::new();
        for (step, block, node, slot) in steps {
            let block = FIRST + block;
            match step {
                0 | 1 if !model.contains_key(&block) => {
                    table.assign(block, at(node, slot));
                    model.insert(block, (at(node, slot), false));
                }
                2 => prop_assert_eq!(
                    table.unassign(block), model.remove(&block).map(|(home, _)| home)),
                3 if model.contains_key(&block) => {
                    table.set_leaving(block, slot % 2 == 0);
                    model.insert(block, (model[&block].0, slot % 2 == 0));
                }
                _ => {}
            }
            for block in FIRST..FIRST + 100 {
                let page = PageIndex::new(block * BLOCK_PAGES + slot % BLOCK_PAGES);
                let expected = model.get(&block);
                prop_assert_eq!(table.home_of(page), expected.map(|&(home, _)| home));
                let eviction = match expected {
                    None | Some((_, true)) => Eviction::Discard,
                    Some((home, _)) if home.node == LOCAL => Eviction::Keep,
                    Some(&(home, _)) => Eviction::WriteBack(home),
                };
                prop_assert_eq!(table.eviction_of(page), eviction);
            }
            prop_assert_eq!(table.added_blocks() as usize, model.len());
            let here = model.values().filter(|(home, _)| home.node == NodeId(node)).count();
            prop_assert_eq!(table.added_blocks_at(NodeId(node)) as usize, here);
        }
    }
}

#[test]
fn links_are_found_by_the_ids_that_the_configuration_gives() {
    let links = [NodeId(200), NodeId(0), NodeId(3)];
    let table = HomeTable::new(NodeId(5), &[], None).with_links(&links);
    for (link, node) in links.into_iter().enumerate() {
        assert_eq!(table.link_to(node), Some(link));
        assert_eq!(table.link_to_home(Home { node, slot: 9 }), link);
    }
    assert_eq!(table.link_to(table.local()), None);
    assert_eq!(table.link_to(NodeId(255)), None);
}

#[test]
fn a_block_that_has_moved_is_not_lost_with_its_old_home() {
    let table = table();
    table.assign_at_start(0, at(1, 0));
    let page = PageIndex::new(0);
    let lost = table.ram_blocks_at(NodeId(1)).map(|(block, _)| block);
    let lost: Vec<_> = lost.collect();
    table.move_home(0, at(1, 0), at(2, 3));
    for block in lost {
        table.set_lost(block, NodeId(1));
    }
    assert!(!table.is_lost(page));
    table.set_lost(0, NodeId(2));
    assert!(table.is_lost(page));
    assert_eq!(table.home(0), Some(at(2, 3)), "it keeps its home");
}

#[test]
fn a_block_that_moves_is_counted_at_its_new_home_in_a_new_epoch() {
    let table = table();
    for block in 0..4 {
        table.assign_at_start(block, at(1, block));
    }
    table.assign_at_start(4, at(2, 0));
    let half = u64::from(BLOCK_PAGES) / 2;
    assert_eq!(table.pages_at(NodeId(2)), half);
    let epoch = table.local_node().epoch();
    table.move_home(4, at(2, 0), at(1, 9));
    assert!(table.local_node().epoch() > epoch);
    assert_eq!(table.home(4), Some(at(1, 9)));
    assert_eq!(table.pages_at(NodeId(2)), 0);
    assert_eq!(table.pages_at(NodeId(1)), 9 * half);
    let blocks: Vec<_> = table.ram_blocks_at(NodeId(1)).collect();
    let expected = [0, 1, 2, 3].map(|block| (block, at(1, block)));
    assert_eq!(blocks[..4], expected);
    assert_eq!(blocks[4..], [(4, at(1, 9))]);
}
