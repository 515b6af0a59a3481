//! Serves the queues of a device on the thread of an event loop.

use std::sync::Arc;

use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::MmioTransport;

/// Token of an event that is not a notification.
const DEVICE_EVENTS: u32 = u32::MAX;
/// Token of the device's timer.
const DEVICE_TIMER: u32 = u32::MAX - 1;

/// Listens to the notifications of a device's queues, and to the device's own events. A device with
/// several threads has a server on each; a notification wakes one that is idle.
#[derive(Debug)]
pub struct QueueServer {
    transport: Arc<MmioTransport>,
}

impl QueueServer {
    /// Creates a server of all queues of a device.
    pub fn new(transport: Arc<MmioTransport>) -> Self {
        Self { transport }
    }

    /// Serves what the events are about, in turns while `keep_serving`, and at least one turn.
    /// Notifies queues that may have more.
    pub fn process_while(&self, events: &Events, keep_serving: &dyn Fn() -> bool) {
        if events.data() == DEVICE_TIMER {
            self.transport.device().timer_expired();
        }
        if [DEVICE_EVENTS, DEVICE_TIMER].contains(&events.data()) {
            for queue in 0..self.transport.notifiers().len() {
                self.transport.serve_while(queue, keep_serving);
            }
            return;
        }
        let Ok(queue) = usize::try_from(events.data()) else {
            return;
        };
        if let Some(notifier) = self.transport.notifiers().get(queue) {
            // A spurious wakeup is no error.
            let _ = notifier.read();
            self.transport.serve_while(queue, keep_serving);
        }
    }
}

impl MutEventSubscriber for QueueServer {
    fn init(&mut self, ops: &mut EventOps) {
        for (queue, notifier) in (0..).zip(self.transport.notifiers()) {
            let set = EventSet::IN | EventSet::EXCLUSIVE;
            if let Err(error) = ops.add(Events::with_data(notifier, queue, set)) {
                tracing::error!(%error, queue, "a queue of a virtio device is not served");
            }
        }
        if let Some(events) = self.transport.device().events() {
            let set = EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED;
            if let Err(error) = ops.add(Events::with_data(&events, DEVICE_EVENTS, set)) {
                tracing::error!(%error, "the events of a virtio device are not served");
            }
        }
        if let Some(timer) = self.transport.device().timer() {
            // One thread suffices: it wakes others while there is more to do.
            let set = EventSet::IN | EventSet::EDGE_TRIGGERED | EventSet::EXCLUSIVE;
            if let Err(error) = ops.add(Events::with_data(&timer, DEVICE_TIMER, set)) {
                tracing::error!(%error, "a virtio device that is throttled is not served");
            }
        }
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        self.process_while(&events, &|| true);
    }
}

#[cfg(test)]
mod tests {
    use event_manager::{EventManager, SubscriberOps};

    use super::*;
    use crate::virtio::test_driver::{BalloonDriver, RING_SIZE};

    #[test]
    fn a_queue_is_served_after_its_bell_has_rung() {
        let driver = BalloonDriver::started();
        let mut manager = EventManager::<QueueServer>::new().unwrap();
        manager.add_subscriber(QueueServer::new(Arc::clone(&driver.transport)));
        // The start has notified it.
        while manager.run_with_timeout(0).unwrap() > 0 {}
        driver.report(&[(0x40_0000, 0x1000)]);
        driver.notify(2);
        assert!(manager.run_with_timeout(1000).unwrap() > 0);
        assert_eq!(driver.discarded(), [(0x40_0000, 0x1000)]);
        assert_eq!(manager.run_with_timeout(0).unwrap(), 0);
    }

    #[test]
    fn a_queue_that_is_to_stop_is_served_once_and_rung_again() {
        let driver = BalloonDriver::started();
        for _ in 0..3 {
            driver.report(&[(0x40_0000, 0x1000)]);
        }
        let notifier = &driver.transport.notifiers()[2];
        for served in 1..=3 {
            let _ = notifier.read();
            driver.transport.serve_while(2, &|| false);
            assert_eq!(driver.discarded().len(), served);
            assert!(notifier.read().is_ok(), "the notification is kept");
        }
        driver.transport.serve_while(2, &|| false);
        assert!(notifier.read().is_err(), "there is nothing more");
    }

    #[test]
    fn a_full_ring_is_served_in_parts() {
        let driver = BalloonDriver::started();
        for _ in 0..RING_SIZE {
            driver.report(&[(0x40_0000, 0x1000)]);
        }
        let notifier = &driver.transport.notifiers()[2];
        let mut parts = 0;
        while notifier.read().is_ok() {
            driver.transport.serve(2);
            parts += 1;
            assert!(parts <= RING_SIZE, "it notifies itself forever");
        }
        assert!(parts > 1, "it notifies itself for the rest");
        assert_eq!(driver.discarded().len(), usize::from(RING_SIZE));
    }
}
