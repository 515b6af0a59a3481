//! The visible state of added memory, and its notifications.

use super::*;
use crate::config::RunSettings;
use crate::instance::memory::fabric_config;
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
