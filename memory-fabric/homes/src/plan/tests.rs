//! The division of guests, and rejected ones.

use super::*;
use fabric_pages::page::{PageIndex, PageRange};
use proptest::prelude::*;

/// Node ids with no meaning in their order.
const LOCAL: NodeId = NodeId(9);

fn donor(number: usize) -> NodeId {
    NodeId(u8::try_from(100 - 2 * number).expect("few donors"))
}

fn range(first: u32, count: u32) -> PageRange {
    PageRange::new(PageIndex::new(first), count)
}

fn loans(pages: &[u64]) -> Vec<Loan> {
    let pages = pages.iter().enumerate();
    pages
        .map(|(number, &pages)| Loan {
            first_slot: 0,
            node: donor(number),
            pages,
        })
        .collect()
}

/// A guest with one range of RAM, without memory that can be added.
fn plan(guest: u32, local: u64, local_use: LocalUse, lent: &[u64]) -> Result<Plan, PlanError> {
    let table = HomeTable::new(LOCAL, &[range(0, guest)], None);
    Plan::new(table, local, local_use, &loans(lent))
}

/// The node and the size of each extent.
fn homes(plan: &Plan) -> Vec<(NodeId, u32)> {
    let extents = plan.homes.ram_extents();
    extents.iter().map(|e| (e.home, e.pages.count)).collect()
}

#[test]
fn a_guest_that_fits_locally_has_no_remote_page() {
    let plan = plan(1000, 1000, LocalUse::Cache, &[500]).expect("fits");
    assert_eq!(plan.homes.pages_at(LOCAL), 1000);
    assert_eq!((plan.cache_pages, plan.beyond_budget_pages), (0, 0));
}

#[test]
fn donors_that_lend_everything_make_all_local_memory_cache() {
    let plan = plan(262_144, 65_536, LocalUse::Cache, &[262_144]).expect("fits");
    assert_eq!(plan.home_here_pages, 0);
    assert_eq!(plan.cache_pages, 65_536);
    assert_eq!(plan.beyond_budget_pages, 0);
    assert_eq!(plan.homes.local_node().epoch(), 1);
}

#[test]
fn loans_that_only_just_suffice_get_the_smallest_cache_on_top() {
    let plan = plan(262_144, 65_536, LocalUse::Cache, &[196_608]).expect("fits");
    assert_eq!(plan.home_here_pages, 65_536);
    assert_eq!(plan.cache_pages, CACHE_PAGES_MIN);
    assert_eq!(plan.beyond_budget_pages, CACHE_PAGES_MIN);
    let expected = [(LOCAL, 32_768), (donor(0), 196_608), (LOCAL, 32_768)];
    assert_eq!(homes(&plan), expected);
}

#[test]
fn what_a_loan_has_beyond_whole_blocks_is_at_home_here() {
    let plan = plan(262_144, 65_000, LocalUse::Cache, &[197_144]).expect("fits");
    let expected = [(LOCAL, 32_768), (donor(0), 197_120), (LOCAL, 32_256)];
    assert_eq!(homes(&plan), expected);
    assert_eq!(plan.beyond_budget_pages, 24 + CACHE_PAGES_MIN);
}

#[test]
fn the_last_block_of_a_guest_fits_into_the_end_of_a_loan() {
    let just = plan(1000, 0, LocalUse::Cache, &[1000]).expect("fits");
    assert_eq!(homes(&just), [(donor(0), 1000)]);
    let shared = plan(1000, 0, LocalUse::Cache, &[512, 488]).expect("fits");
    assert_eq!(homes(&shared), [(donor(0), 512), (donor(1), 488)]);
    // A block that does not fit has its home here.
    let short = plan(1000, 1, LocalUse::Cache, &[999]).expect("fits");
    assert_eq!(homes(&short), [(LOCAL, 512), (donor(0), 488)]);
}

#[test]
fn too_little_memory_is_an_error_that_says_how_much_is_missing() {
    let error = plan(262_144, 65_536, LocalUse::Cache, &[131_072]).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("1024 MiB") && text.contains("256 MiB"),
        "{text}"
    );
}

#[test]
fn local_memory_that_is_a_home_keeps_a_quarter_as_cache() {
    let divided = plan(262_144, 65_536, LocalUse::Home, &[131_072, 131_072]).expect("fits");
    assert_eq!(divided.home_here_pages, 49_152);
    assert_eq!(divided.cache_pages, 16_384);
    assert_eq!(
        homes(&divided),
        [
            (LOCAL, 24_576),
            (donor(0), 106_496),
            (donor(1), 106_496),
            (LOCAL, 24_576)
        ]
    );
    // A small local memory is used as cache completely.
    let least = CACHE_PAGES_MIN + 100;
    let all_cache = plan(262_144, least, LocalUse::Home, &[262_144]).expect("fits");
    assert_eq!(all_cache.home_here_pages, 0);
    // Donors that lend too little for that leave a smaller cache.
    let smaller = plan(262_144, 65_536, LocalUse::Home, &[200_000]).expect("fits");
    assert_eq!(smaller.home_here_pages, 262_144 - 199_680);
}

#[test]
fn slots_run_on_across_the_hole() {
    let ram = [range(0, BLOCK_PAGES), range(8 * BLOCK_PAGES, BLOCK_PAGES)];
    let table = HomeTable::new(LOCAL, &ram, None);
    let lent = loans(&[2 * u64::from(BLOCK_PAGES)]);
    let plan = Plan::new(table, 0, LocalUse::Cache, &lent).expect("fits");
    assert_eq!(plan.homes.ram_extents().len(), 2);
    let page = PageIndex::new(8 * BLOCK_PAGES + 1);
    let home = plan.homes.home_of(page).expect("it has one");
    assert_eq!(
        home.offset_of(page),
        u64::from(BLOCK_PAGES + 1) << PAGE_SHIFT
    );
    let hole = PageIndex::new(2 * BLOCK_PAGES);
    assert_eq!(plan.homes.home_of(hole), None);
}

#[test]
fn memory_that_can_be_added_gets_a_cache_and_no_home() {
    let table = || HomeTable::new(LOCAL, &[range(0, 8192)], Some(range(16_384, 8192)));
    let plan = Plan::new(table(), 20_000, LocalUse::Cache, &[]).expect("fits");
    assert_eq!((plan.home_here_pages, plan.cache_pages), (8192, 11_808));
    assert_eq!(plan.beyond_budget_pages, 0);
    assert_eq!(plan.homes.home_of(PageIndex::new(16_384)), None);
    let tight = Plan::new(table(), 8192, LocalUse::Cache, &[]).expect("fits");
    assert_eq!(tight.cache_pages, CACHE_PAGES_MIN);
    assert_eq!(tight.beyond_budget_pages, CACHE_PAGES_MIN);
}

proptest! {
    #[test]
    fn every_page_has_one_home_and_its_own_slot(
        low in 1_u32..20_000,
        high in 0_u32..20_000,
        local in 0_u64..40_000,
        lent in prop::collection::vec(0_u64..20_000, 0..5),
        local_use in prop::sample::select(vec![LocalUse::Cache, LocalUse::Home]),
    ) {
        let ram = [range(0, low), range(40 * BLOCK_PAGES, high)];
        let table = HomeTable::new(LOCAL, &ram, None);
        let Ok(plan) = Plan::new(table, local, local_use, &loans(&lent)) else {
            prop_assert!(u64::from(low + high) > local + lent.iter().sum::<u64>());
            return Ok(());
        };
        let mut slots = std::collections::HashSet::new();
        for page in ram.iter().flat_map(|range| range.iter()) {
            let home = plan.homes.home_of(page).expect("every page has a home");
            if home.node != LOCAL {
                let offset = home.offset_of(page);
                let number = (0..lent.len()).find(|&number| donor(number) == home.node);
                let pages = lent[number.expect("one of the donors")];
                prop_assert!(offset >> PAGE_SHIFT < pages);
                prop_assert!(slots.insert((home.node, offset)));
            }
        }
        let here = plan.homes.pages_at(LOCAL);
        prop_assert_eq!(here, plan.home_here_pages);
        prop_assert_eq!(here + slots.len() as u64, u64::from(low + high));
        prop_assert!(here + plan.cache_pages <= local + plan.beyond_budget_pages);
        // The excess consists of a minimal cache, and of the cut ends of loans and of both ranges.
        let cut = u64::from(BLOCK_PAGES) * (lent.len() as u64 + 2);
        prop_assert!(plan.beyond_budget_pages <= CACHE_PAGES_MIN + cut);
    }
}
