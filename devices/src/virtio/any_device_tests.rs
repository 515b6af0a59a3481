//! Properties of every device: no register access, in any state, makes it panic or hang, and a
//! correct driver can use it afterwards.

use proptest::prelude::*;

use super::test_driver::{Access, Driver, STARTED, accesses};
use super::{
    Block, Console, Disk, Entropy, FreeRange, HostSocket, MEM_BLOCK_BYTES, Mem, MemRegion, Net,
    NotNow, Pluggable, VirtioDevice, Vsock,
};

fn survives<D: VirtioDevice + 'static>(
    driver: &Driver<D>,
    started: bool,
    accesses: Vec<Access>,
) -> Result<(), TestCaseError> {
    if started {
        driver.start(driver.offered());
    }
    for access in accesses {
        driver.access(access);
    }
    driver.clear_rings();
    driver.start(driver.offered());
    prop_assert_eq!(driver.get(0x70), STARTED);
    for queue in 0..driver.device.queue_sizes().len() {
        driver.serve(queue);
    }
    prop_assert_eq!(driver.get(0x70), STARTED);
    Ok(())
}

proptest! {
    #[test]
    fn a_disk_survives_any_accesses(
        started: bool,
        read_only: bool,
        accesses in proptest::collection::vec(accesses(), 0..200),
    ) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let disk = Disk::open(file.path(), read_only).unwrap();
        survives(&Driver::of(Block::new(0, disk)), started, accesses)?;
    }

    #[test]
    fn the_entropy_device_survives_any_accesses(
        started: bool,
        accesses in proptest::collection::vec(accesses(), 0..200),
    ) {
        survives(&Driver::of(Entropy::new().unwrap()), started, accesses)?;
    }

    #[test]
    fn a_memory_device_survives_any_accesses(
        started: bool,
        accesses in proptest::collection::vec(accesses(), 0..200),
    ) {
        #[derive(Debug)]
        struct Any;
        impl Pluggable for Any {
            fn plug(&self, _: FreeRange) -> Result<(), NotNow> {
                Ok(())
            }
            fn unplug(&self, _: FreeRange) -> Result<(), NotNow> {
                Ok(())
            }
        }
        let region = MemRegion { start: 1 << 32, bytes: 64 * MEM_BLOCK_BYTES, node: None };
        let device = Mem::new(region, std::sync::Arc::new(Any));
        device.set_requested_bytes(region.bytes);
        survives(&Driver::of(device), started, accesses)?;
    }

    #[test]
    fn a_network_card_survives_any_accesses(
        started: bool,
        accesses in proptest::collection::vec(accesses(), 0..200),
    ) {
        let (card, host) = Net::on_sockets();
        for _ in 0..3 {
            host.send(&[0; 100]).unwrap();
        }
        survives(&Driver::of(card), started, accesses)?;
    }

    #[test]
    fn a_console_survives_any_accesses(
        started: bool,
        accesses in proptest::collection::vec(accesses(), 0..200),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let socket = HostSocket::listen("console", &directory.path().join("c")).unwrap();
        survives(&Driver::of(Console::new(&socket).unwrap()), started, accesses)?;
    }

    #[test]
    fn a_vsock_survives_any_accesses(
        started: bool,
        accesses in proptest::collection::vec(accesses(), 0..200),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let socket = HostSocket::listen("vsock", &directory.path().join("v")).unwrap();
        let device = Vsock::new(3, &socket).unwrap();
        survives(&Driver::of(device), started, accesses)?;
    }
}
