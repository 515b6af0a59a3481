//! The visible state of added memory, and its notifications.

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::*;
use crate::config::RunSettings;
use crate::instance::memory::{fabric_config, guest_memory};
use crate::machine::all_memory_ranges;
use crate::size::ByteSize;

const BLOCKS: u64 = 8;

fn grown(region: MemRegion, first: u64, count: u64) -> FreeRange {
    FreeRange {
        start: vm_memory::GuestAddress(region.start + first * MEM_BLOCK_BYTES),
        bytes: count * MEM_BLOCK_BYTES,
    }
}

#[test]
fn each_block_that_comes_or_goes_is_told_and_what_fails_is_not() {
    let size = |bytes| ByteSize::from_bytes(bytes);
    let settings = RunSettings {
        // The file is not read.
        kernel: Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").into()),
        memory: size(64 << 20),
        hotplug_memory: Some(size(BLOCKS * MEM_BLOCK_BYTES)),
        ..RunSettings::default()
    };
    let config = settings.parse().expect("is valid");
    let fabric_config = fabric_config(&config, None).expect("is valid");
    let observer: memory_fabric::fabric::FabricObserver = Arc::new(|_| {});
    let fabric = Fabric::start(&fabric_config, &observer).expect("userfaultfd");
    let changes = Changes::default();
    let plugged = HotplugMemory::new(&fabric, None, None, &changes).expect("it was asked for");
    let blocks = Blocks {
        source: plugged.source.clone(),
        changes: changes.clone(),
    };
    let region = plugged.device.region();
    let seen = || {
        (
            changes.count(),
            plugged.body().plugged_bytes / MEM_BLOCK_BYTES,
        )
    };

    assert_eq!(blocks.plug(grown(region, 0, 1)), Err(NotNow));
    assert_eq!(seen(), (0, 0), "nothing was asked for");
    plugged
        .source
        .request(4 * MEM_BLOCK_BYTES, None)
        .expect("there is room");
    assert_eq!(blocks.plug(grown(region, 2, 3)), Ok(()));
    assert_eq!(seen(), (1, 3));
    assert_eq!(blocks.plug(grown(region, 5, 2)), Err(NotNow));
    assert_eq!(seen(), (1, 3), "that would be too much");
    assert_eq!(blocks.unplug(grown(region, 3, 2)), Ok(()));
    assert_eq!(seen(), (2, 1));
    assert_eq!(plugged.body().changes, 2);
    plugged.end();
    assert!(plugged.joining().ended);
    assert_eq!(seen(), (3, 1));
}

#[test]
fn hosts_with_vcpus_have_what_may_be_added_from_the_start() {
    const MEMORY: u64 = 64 << 20;
    const ADDED: u64 = BLOCKS * MEM_BLOCK_BYTES;
    let settings = RunSettings {
        // The file is not read.
        kernel: Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").into()),
        memory: ByteSize::from_bytes(MEMORY),
        hotplug_memory: Some(ByteSize::from_bytes(ADDED)),
        cpus: 2,
        nodes: vec!["127.0.0.1:7000,cpus=1".parse().expect("a node")],
        ..RunSettings::default()
    };
    let config = settings.parse().expect("is valid");
    let fabric_config = fabric_config(&config, None).expect("is valid");
    let observer: memory_fabric::fabric::FabricObserver = Arc::new(|_| {});
    let fabric = Fabric::start(&fabric_config, &observer).expect("memory");
    assert!(fabric.hotplug().is_none(), "the pager has no part in it");
    let view = guest_memory(fabric.memory(), MEMORY, ADDED).expect("all of it is there");
    let regions = view
        .iter()
        .map(|region| (region.start_addr(), region.len()));
    let regions: Vec<_> = regions.collect();
    assert_eq!(regions, all_memory_ranges(MEMORY, ADDED));
    assert_eq!(regions.len(), 2);
}
