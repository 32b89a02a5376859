// The JDK's HTTP client, as it comes: it offers HTTP/2 in the first request (Upgrade: h2c).
//   java Ask.java http://127.0.0.1:8080/v1/chat/completions KEY
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.stream.Stream;

public class Ask {
    static final HttpClient CLIENT = HttpClient.newHttpClient();

    static HttpRequest request(String[] args, boolean stream) {
        String body = "{\"model\":\"llama-3-8b\",\"max_tokens\":4,\"stream\":" + stream
            + ",\"messages\":[{\"role\":\"user\",\"content\":\"Say something.\"}]}";
        return HttpRequest.newBuilder(URI.create(args[0]))
            .header("Content-Type", "application/json")
            .header("Authorization", "Bearer " + args[1])
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
    }

    public static void main(String[] args) throws Exception {
        for (int turn = 0; turn < 3; turn++) {
            HttpResponse<String> whole =
                CLIENT.send(request(args, false), HttpResponse.BodyHandlers.ofString());
            check(whole.statusCode() == 200 && whole.body().contains("\"usage\""), whole.body());
            HttpResponse<Stream<String>> stream =
                CLIENT.send(request(args, true), HttpResponse.BodyHandlers.ofLines());
            String last = stream.body().filter(line -> !line.isEmpty()).reduce("", (a, b) -> b);
            check(stream.statusCode() == 200 && last.equals("data: [DONE]"), last);
        }
        System.out.println("all work");
    }

    static void check(boolean good, String text) {
        if (!good) {
            throw new AssertionError(text);
        }
    }
}
