//! How guests are divided, and what is refused.

use super::*;
use proptest::prelude::*;

fn range(first: u32, count: u32) -> PageRange {
    PageRange::new(PageIndex::new(first), count)
}

fn loans(pages: &[u64]) -> Vec<Loan> {
    (1..)
        .zip(pages)
        .map(|(node, &pages)| Loan {
            node: NodeId(node),
            pages,
        })
        .collect()
}

/// The node of each extent, and its pages.
fn homes(plan: &Plan) -> Vec<(u16, u32)> {
    let extents = plan.layout.extents().iter();
    extents.map(|e| (e.home.0, e.pages.count)).collect()
}

#[test]
fn a_guest_that_fits_locally_has_no_remote_page() {
    let plan = Plan::new(&[range(0, 1000)], 1000, LocalUse::Cache, &loans(&[500])).expect("fits");
    assert_eq!(plan.layout.pages_at(NodeId::COMPUTE), 1000);
    assert_eq!(plan.cache_pages, 0);
}

#[test]
fn donors_that_lend_everything_make_all_local_memory_cache() {
    let plan = Plan::new(
        &[range(0, 262_144)],
        65_536,
        LocalUse::Cache,
        &loans(&[262_144]),
    )
    .expect("fits");
    assert_eq!(plan.home_here_pages, 0);
    assert_eq!(plan.cache_pages, 65_536);
    assert_eq!(plan.cache_beyond_budget_pages, 0);
}

#[test]
fn loans_that_only_just_suffice_get_the_smallest_cache_on_top() {
    let plan = Plan::new(
        &[range(0, 262_144)],
        65_536,
        LocalUse::Cache,
        &loans(&[196_608]),
    )
    .expect("fits");
    assert_eq!(plan.home_here_pages, 65_536);
    assert_eq!(plan.cache_pages, CACHE_PAGES_MIN);
    assert_eq!(plan.cache_beyond_budget_pages, CACHE_PAGES_MIN);
    assert_eq!(homes(&plan), [(0, 32_768), (1, 196_608), (0, 32_768)]);
}

#[test]
fn what_is_at_home_here_is_cut_between_huge_pages() {
    let plan = Plan::new(
        &[range(0, 262_144)],
        65_000,
        LocalUse::Cache,
        &loans(&[197_144]),
    )
    .expect("fits");
    assert_eq!(homes(&plan), [(0, 32_768), (1, 197_144), (0, 32_232)]);
    // Too little for a huge page is all at the bottom.
    let plan = Plan::new(&[range(0, 1000)], 100, LocalUse::Cache, &loans(&[900])).expect("fits");
    assert_eq!(plan.layout.extents().len(), 2);
    assert_eq!(plan.layout.extents()[0].pages.count, 100);
}

#[test]
fn too_little_memory_is_an_error_that_says_how_much_is_missing() {
    let error = Plan::new(
        &[range(0, 262_144)],
        65_536,
        LocalUse::Cache,
        &loans(&[131_072]),
    )
    .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("1024 MiB") && text.contains("256 MiB"),
        "{text}"
    );
}

#[test]
fn local_memory_that_is_a_home_keeps_a_quarter_as_cache() {
    let plan = Plan::new(
        &[range(0, 262_144)],
        65_536,
        LocalUse::Home,
        &loans(&[131_072, 131_072]),
    )
    .expect("fits");
    assert_eq!(plan.home_here_pages, 49_152);
    assert_eq!(plan.cache_pages, 16_384);
    assert_eq!(
        homes(&plan),
        [(0, 24_576), (1, 106_496), (2, 106_496), (0, 24_576)]
    );
    // Little local memory is all cache.
    let least = CACHE_PAGES_MIN + 100;
    let plan = Plan::new(
        &[range(0, 262_144)],
        least,
        LocalUse::Home,
        &loans(&[262_144]),
    );
    assert_eq!(plan.expect("fits").home_here_pages, 0);
    // Donors that lend too little for that leave a smaller cache, as ever.
    let plan = Plan::new(
        &[range(0, 262_144)],
        65_536,
        LocalUse::Home,
        &loans(&[200_000]),
    );
    assert_eq!(plan.expect("fits").home_here_pages, 62_144);
}

#[test]
fn offsets_run_on_across_the_hole() {
    let ranges = [range(0, 100), range(1000, 100)];
    let plan = Plan::new(&ranges, 0, LocalUse::Cache, &loans(&[200])).expect("fits");
    let extents = plan.layout.extents();
    assert_eq!(extents.len(), 2);
    assert_eq!(
        extents[1].offset_of(PageIndex::new(1001)),
        101 << PAGE_SHIFT
    );
    assert!(plan.layout.extent_of(PageIndex::new(500)).is_none());
}

proptest! {
    #[test]
    fn every_page_has_one_home_and_its_own_slot(
        low in 1_u32..2000,
        high in 0_u32..2000,
        local in 0_u64..4000,
        lent in prop::collection::vec(0_u64..2000, 0..5),
        local_use in prop::sample::select(vec![LocalUse::Cache, LocalUse::Home]),
    ) {
        let ranges = [range(0, low), range(10_000, high)];
        let Ok(plan) = Plan::new(&ranges, local, local_use, &loans(&lent)) else {
            prop_assert!(u64::from(low + high) > local + lent.iter().sum::<u64>());
            return Ok(());
        };
        let mut slots = std::collections::HashSet::new();
        for page in ranges.iter().flat_map(|range| range.iter()) {
            let extent = plan.layout.extent_of(page).expect("every page has an extent");
            if extent.home != NodeId::COMPUTE {
                let offset = extent.offset_of(page);
                let donor = usize::from(extent.home.0) - 1;
                prop_assert!(offset >> PAGE_SHIFT < lent[donor]);
                prop_assert!(slots.insert((extent.home, offset)));
            }
        }
        prop_assert_eq!(
            plan.layout.pages_at(NodeId::COMPUTE) + slots.len() as u64,
            u64::from(low + high)
        );
        prop_assert!(plan.home_here_pages + plan.cache_pages <= local.max(plan.home_here_pages) + plan.cache_beyond_budget_pages);
    }
}
